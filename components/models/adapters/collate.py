"""Collate samples of different lengths and their images into the right-padded tensors of one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from armature.components.artifacts.images import to_rgb
from armature.components.artifacts.videos import Video
from armature.components.contracts.batches import MultimodalBatch, Sample
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import TokenIds
from armature.components.families.family import ImageInputs, VideoInputs
from armature.components.families.joins import Features
from armature.components.models.adapters.sequences import runs_fit

Shown = Image.Image | Video
ImageSource = Callable[[ImageRef], Shown]
"""Function that opens the image or video of a reference."""

PLACEHOLDER_RUNS = "placeholder_runs"
"""Key, among the features of an image, of a tensor (R,) with the lengths of the R runs of feature tokens. A run is a
stretch of consecutive feature tokens in the text that the processor writes for the image."""
TIME_STEP = "time_step"
"""Key, among the features of a video, of a scalar tensor with the positions in time from one group of frames to the
next."""
TEXT_OUTPUTS = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Names of the processor's outputs that describe the text. All other outputs describe images."""


def run_lengths(ids: Tensor, token: int) -> Tensor:
    """Return the length of each run of consecutive `token` in `ids` (L,), as int64 of shape (R,) for R runs."""
    positions = np.flatnonzero(ids.numpy() == token)
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return torch.tensor([len(run) for run in runs if len(run)], dtype=torch.int64)


def _outputs(processor: Any, what: str, **inputs: Any) -> Any:
    """Return what a processor makes of its inputs; `what` describes the image or video among them.

    Raises:
        DataError: the processor refuses them.
    """
    try:
        return processor(return_tensors="pt", **inputs)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise DataError(
            f"the processor cannot use {what}: {error}",
            code="image_not_processed",
            where=type(processor).__name__,
            remedy="the sample is dropped and counted; resize such images or videos in the environment",
        ) from error


def process_one(processor: Any, image: Image.Image, feature_token: int) -> dict[str, Tensor]:
    """Return the processor's outputs for one image, without those for the text. The key `PLACEHOLDER_RUNS` is added.

    The whole processor is called instead of its image processor, since only it knows its own options (tiles, patch
    size) and how many tokens the features need.

    Raises:
        DataError: the processor refuses the image.
    """
    what = f"an image of {image.width}x{image.height} pixels"
    outputs = _outputs(processor, what, images=[image], text=[processor.image_token])
    features = {name: value for name, value in outputs.items() if name not in TEXT_OUTPUTS}
    features[PLACEHOLDER_RUNS] = run_lengths(outputs["input_ids"][0], feature_token)
    return features


def video_arguments(videos: Sequence[Video]) -> dict[str, Any]:
    """Return the arguments of a processor that show it exactly these frames with their times."""
    from transformers.video_utils import VideoMetadata

    frames = [np.stack([np.asarray(frame) for frame in video.frames]) for video in videos]
    return {
        "videos": [torch.from_numpy(each).permute(0, 3, 1, 2) for each in frames],
        "video_metadata": [VideoMetadata(**video.metadata) for video in videos],
        "do_sample_frames": False,
    }


def process_video(
    processor: Any, video: Video, spec: VideoInputs, token: int, tokens_per_second: float
) -> dict[str, Tensor]:
    """Return a video's features under the names of an image's. The keys `PLACEHOLDER_RUNS` and `TIME_STEP` are added.

    Raises:
        DataError: the processor refuses the video.
    """
    what = f"a video of {len(video.frames)} frames of {video.size[0]}x{video.size[1]} pixels"
    outputs = _outputs(processor, what, text=[processor.video_token], **video_arguments([video]))
    features: dict[str, Tensor] = {name: outputs[output] for output, name in spec.outputs.items()}
    features[PLACEHOLDER_RUNS] = run_lengths(outputs["input_ids"][0], token)
    step = 1.0
    if spec.seconds:  # vLLM takes the seconds from a float32 tensor, and computes in float64 from there
        step = float(torch.as_tensor(outputs[spec.seconds]).float()[0]) * tokens_per_second
    features[TIME_STEP] = torch.tensor(step, dtype=torch.float64)
    return features


def media_positions(shown: Tensor, features: Sequence[Features]) -> Tensor:
    """Return the positions (3, L) in time, height and width of a row's tokens, as vLLM computes them for Qwen models.

    Text after an image or a group of frames goes on behind the largest position there. (After a video, transformers
    5.23 goes on behind its height or width, so that text gets positions which frames have.)

    Args:
        shown: (L,) bool, True at tokens of images and videos.
        features: features of the row's images and videos, in order.
    """
    parts, begin, position = [], 0, 0
    places = shown.nonzero()[:, 0].tolist()
    at = 0
    for one in features:
        t, h, w = one["image_grid_thw"][0].tolist()
        runs = one[PLACEHOLDER_RUNS].tolist()
        merge = round((t * h * w / sum(runs)) ** 0.5)
        frames = torch.arange(t // len(runs), dtype=torch.float64) * float(one.get(TIME_STEP, 1.0))
        grid = torch.meshgrid(frames.long(), torch.arange(h // merge), torch.arange(w // merge), indexing="ij")
        for run in runs:
            text = places[at] - begin
            parts.append(torch.arange(text).expand(3, -1) + position)
            parts.append(torch.stack(grid).flatten(1) + position + text)
            position, begin, at = int(parts[-1].max()) + 1, places[at] + run, at + run
    parts.append(torch.arange(len(shown) - begin).expand(3, -1) + position)
    return torch.cat(parts, 1)


def is_missing(error: Exception) -> bool:
    """True if an image source raised `error` because it does not have the image, rather than because the image is
    damaged."""
    return isinstance(error, FileNotFoundError | KeyError) or isinstance(error.__cause__, FileNotFoundError)


def image_features(features: Features) -> dict[str, Tensor]:
    """Return the features without the key `PLACEHOLDER_RUNS`."""
    return {name: value for name, value in features.items() if name != PLACEHOLDER_RUNS}


def pad_rows(rows: Sequence[np.ndarray[Any, Any]], value: float, dtype: torch.dtype) -> Tensor:
    """Stack rows to (B, longest row), padded with `value` on the right."""
    padded = torch.full((len(rows), max(len(row) for row in rows)), value, dtype=dtype)
    for row, target in zip(rows, padded, strict=True):
        target[: len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def token_type_ids(input_ids: Tensor, attention_mask: Tensor, image_tokens: Collection[int]) -> Tensor:
    """Return type ids (B, L) int64 for whole sequences, including completions: 1 on `image_tokens`, 0 on text and
    padding."""
    return torch.isin(input_ids, torch.tensor(sorted(image_tokens))).long() * attention_mask


def text_batch(samples: Sequence[Sample], pad_id: int) -> MultimodalBatch:
    """Return a batch of B samples without image inputs. Ids and attention mask are int64, the loss mask is bool, and
    other tensors are float32."""
    ids = pad_rows([sample.input_ids for sample in samples], pad_id, torch.int64)
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    return MultimodalBatch(
        input_ids=ids,
        attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        loss_mask=pad_rows([sample.loss_mask for sample in samples], False, torch.bool),
        behavior_logprobs=pad_rows([sample.behavior_logprobs for sample in samples], 0.0, torch.float32),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        advantages=pad_rows([sample.advantages for sample in samples], 0.0, torch.float32),
        experts=_pad_experts(samples, ids.shape[1]),
    )


def _pad_experts(samples: Sequence[Sample], length: int) -> Tensor | None:
    """Return the experts of the samples' tokens, (B, length, layers, k) int16 with -1 at padding; None if no sample has
    any."""
    shape = next((sample.experts.shape[1:] for sample in samples if sample.experts is not None), None)
    if shape is None:
        return None
    padded = torch.full((len(samples), length, *shape), -1, dtype=torch.int16)
    for sample, row in zip(samples, padded, strict=True):
        if sample.experts is not None:
            row[: len(sample.experts)] = torch.from_numpy(sample.experts)
    return padded


class SampleCollator:
    """Turns samples into the tensors of one model family. It is the only part of a family that a trainer needs.

    Attributes:
        image_token_id: token that takes one image feature at each occurrence.
        typed_token_ids: tokens that the model's type ids mark.
        forbidden_token_ids: tokens that only a processor may write and no policy may sample.
    """

    def __init__(self, processor: Any, spec: ImageInputs, tokens_per_second: float = 1.0) -> None:
        """Read the token ids. `tokens_per_second` are positions in a second of video; see the model's configuration."""
        self.processor, self.spec, self.tokens_per_second = processor, spec, tokens_per_second
        self.image_token_id = _token_id(spec.feature_token, processor)
        self.video_token_id = None if spec.videos is None else _token_id(spec.videos.token, processor)
        self.typed_token_ids = frozenset(_known_token_ids(spec.typed_tokens, processor) or [self.image_token_id])
        reserved = _known_token_ids((processor.image_token, *spec.reserved), processor)
        self.forbidden_token_ids = frozenset({self.image_token_id, *self.typed_token_ids, *reserved})
        pad = processor.tokenizer.pad_token_id
        self.pad_token_id = int(pad if pad is not None else processor.tokenizer.eos_token_id)

    def as_image_tokens(self, ids: TokenIds) -> TokenIds:
        """Return `ids` with image tokens in place of video tokens, since a video is an image of several frames here."""
        if self.video_token_id is None:
            return ids
        return np.where(ids == self.video_token_id, np.int32(self.image_token_id), ids)

    def process_image(self, image: Shown) -> dict[str, Tensor]:
        """Return the features of one image or video on the CPU, which can be cached per distinct image.

        Raises:
            DataError: the processor refuses the image.
            ConfigurationError: the processor's outputs differ from those declared by the family, or it takes no videos.
        """
        if isinstance(image, Video):
            if self.spec.videos is None or self.video_token_id is None:
                raise ConfigurationError(
                    "models of this family are not shown videos",
                    code="video_unsupported",
                    where=type(self.processor).__name__,
                    remedy="show frames as images, or choose a family with videos: docs/models.md",
                )
            return process_video(self.processor, image, self.spec.videos, self.video_token_id, self.tokens_per_second)
        features = process_one(self.processor, to_rgb(image), self.image_token_id)
        outputs = image_features(features).keys()
        if outputs != self.spec.joins.keys():
            raise ConfigurationError(
                f"the image processor returns {sorted(outputs)}, but its family declares {sorted(self.spec.joins)}",
                code="processor_outputs_mismatch",
                where=type(self.processor).__name__,
                remedy="declare every output in ImageInputs.joins",
            )
        return features

    def join(self, features: Sequence[Features], names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Join the features of several images into model inputs, equal to the processor's outputs for all of them at
        once.

        Args:
            names: inputs to return, as far as the family has them; None for all.
        """
        if not features:
            return {}
        joins = {name: join for name, join in self.spec.joins.items() if names is None or name in names}
        return {name: join([one[name] for one in features], features) for name, join in joins.items()}

    def collate(self, samples: Sequence[Sample], images: ImageSource) -> MultimodalBatch:
        """Return the same batch as `collate_features`. Each distinct image is opened and processed once."""
        return self.collate_features(samples, cache(lambda ref: self.process_image(images(ref))))

    def collate_features(self, samples: Sequence[Sample], features: Callable[[ImageRef], Features]) -> MultimodalBatch:
        """Return the right-padded batch of `samples`, one row per sample in their order.

        Args:
            features: returns the result of `process_image` for an image.

        Raises:
            DataError: there are no samples, or a row's placeholders do not match its images.
        """
        batch = self.rows(samples)
        of_rows = [[features(ref) for ref in sample.images] for sample in samples]
        for sample, of_row in zip(samples, of_rows, strict=True):
            self.check_row(sample, of_row)
        self.add_positions(batch, of_rows)
        self.add_images(batch, [one for of_row in of_rows for one in of_row])
        return batch

    def rows(self, samples: Sequence[Sample]) -> MultimodalBatch:
        """Return the right-padded batch without image inputs.

        Raises:
            DataError: there are no samples.
        """
        if not samples:
            raise DataError("a batch needs at least one sample", code="empty_batch")
        batch = text_batch(samples, self.pad_token_id)
        if self.spec.type_ids is not None:
            batch.extra_model_kwargs[self.spec.type_ids] = token_type_ids(
                batch.input_ids, batch.attention_mask, self.typed_token_ids
            )
        return batch

    def add_images(self, batch: MultimodalBatch, features: Sequence[Features]) -> None:
        """Add the model inputs of images, in order, to a batch."""
        joined = self.join(features)
        batch.pixel_values = joined.pop("pixel_values", None)
        batch.extra_model_kwargs |= joined

    def add_positions(self, batch: MultimodalBatch, features: Sequence[Sequence[Features]]) -> None:
        """Add `position_ids` (3, B, L) to a batch with a video; `features` are the images and videos of each row."""
        if any(TIME_STEP in one for of_row in features for one in of_row):
            shown = batch.input_ids == self.image_token_id
            rows = [media_positions(*row) for row in zip(shown, features, strict=True)]
            batch.extra_model_kwargs["position_ids"] = torch.stack(rows, 1)

    def check_row(self, sample: Sample, features: Sequence[Features]) -> None:
        """Check that a sample's placeholders match its images.

        Raises:
            DataError: they do not.
        """
        runs = [run for one in features for run in one[PLACEHOLDER_RUNS].tolist()]
        if not runs_fit(sample.input_ids, self.image_token_id, runs):
            count = int((sample.input_ids == self.image_token_id).sum())
            raise DataError(
                f"{count} image tokens for {len(features)} images that need {sum(runs)}, in runs of {runs[:8]}",
                code="image_tokens_mismatch",
                where=f"sample {sample.sample_id}",
                remedy="use the processor (and its image size) that the samples were built with",
            )


def _token_id(token: str, processor: Any) -> int:
    """Return the id of a token, given as a text or as a path from the processor (see `ImageInputs`).

    Raises:
        ConfigurationError: the processor has no such attribute, or the tokenizer has no such token.
    """
    text: Any = token
    if token.startswith("."):
        text = processor
        for name in token[1:].split("."):
            text = getattr(text, name, None)
    vocabulary = processor.tokenizer.get_vocab()
    if not isinstance(text, str) or text not in vocabulary:
        raise ConfigurationError(
            f"the tokenizer has no token {text if isinstance(text, str) else token!r}, which stands for images",
            code="image_token_missing",
            where=f"{type(processor).__name__} with {len(vocabulary)} tokens",
            remedy="load the processor that belongs to the model, or add its family: docs/extending.md",
        )
    return int(vocabulary[text])


def _known_token_ids(tokens: tuple[str, ...], processor: Any) -> list[int]:
    """Return the ids of those `tokens` that the tokenizer has. Some checkpoints of a family lack some of them."""
    vocabulary = processor.tokenizer.get_vocab()
    return [int(vocabulary[token]) for token in tokens if token in vocabulary]
