"""Samples of different lengths into the right-padded tensors of one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from armature.components.artifacts.images import to_rgb
from armature.components.contracts.batches import MultimodalBatch, Sample
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.images import ImageRef
from armature.components.families.family import ImageInputs
from armature.components.families.joins import Features
from armature.components.models.adapters.sequences import runs_fit

# One image through the family's processor: its features, and the tokens that they need.

ImageSource = Callable[[ImageRef], Image.Image]

# Kept beside an image's features: lengths (R,) of the consecutive runs of feature tokens in its expansion.
PLACEHOLDER_RUNS = "placeholder_runs"
TEXT_OUTPUTS = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})


def run_lengths(ids: Tensor, token: int) -> Tensor:
    """Lengths (R,) int64 of the maximal runs of `token` in `ids` (L,)."""
    positions = np.flatnonzero(ids.numpy() == token)
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return torch.tensor([len(run) for run in runs if len(run)], dtype=torch.int64)


def process_one(processor: Any, image: Image.Image, feature_token: int) -> dict[str, Tensor]:
    """Everything that the processor makes of one image, and `PLACEHOLDER_RUNS`.

    The whole processor is called, not its image processor alone: it knows options of its own (tiles, patch size)
    and is the only one that knows how many tokens the features need.

    Raises:
        DataError: the processor refuses the image.
    """
    try:
        outputs = processor(images=[image], text=[processor.image_token], return_tensors="pt")
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise DataError(
            f"the image processor cannot use an image of {image.width}x{image.height} pixels: {error}",
            code="image_not_processed",
            where=type(processor).__name__,
            remedy="the sample is dropped and counted; resize such images in the environment",
        ) from error
    features = {name: value for name, value in outputs.items() if name not in TEXT_OUTPUTS}
    features[PLACEHOLDER_RUNS] = run_lengths(outputs["input_ids"][0], feature_token)
    return features


def is_missing(error: Exception) -> bool:
    """Whether an image source failed because it does not have the image, not because the image is bad."""
    return isinstance(error, FileNotFoundError | KeyError) or isinstance(error.__cause__, FileNotFoundError)


def image_features(features: Features) -> dict[str, Tensor]:
    """The features without what is only kept beside them."""
    return {name: value for name, value in features.items() if name != PLACEHOLDER_RUNS}


def pad_rows(rows: Sequence[np.ndarray[Any, Any]], value: float, dtype: torch.dtype) -> Tensor:
    """(B, longest row), filled with `value` on the right."""
    padded = torch.full((len(rows), max(len(row) for row in rows)), value, dtype=dtype)
    for row, target in zip(rows, padded, strict=True):
        target[: len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def token_type_ids(input_ids: Tensor, attention_mask: Tensor, image_tokens: Collection[int]) -> Tensor:
    """(B, L) int64: 1 on `image_tokens`, 0 on text and padding; of whole sequences, completions included."""
    return torch.isin(input_ids, torch.tensor(sorted(image_tokens))).long() * attention_mask


def text_batch(samples: Sequence[Sample], pad_id: int) -> MultimodalBatch:
    """A batch of B samples without what comes from images: int64 ids and mask, bool loss mask, float32 else."""
    ids = pad_rows([sample.input_ids for sample in samples], pad_id, torch.int64)
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    return MultimodalBatch(
        input_ids=ids,
        attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        loss_mask=pad_rows([sample.loss_mask for sample in samples], False, torch.bool),
        behavior_logprobs=pad_rows([sample.behavior_logprobs for sample in samples], 0.0, torch.float32),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        advantages=pad_rows([sample.advantages for sample in samples], 0.0, torch.float32),
    )


class SampleCollator:
    """Samples to the tensors of one family: all that a trainer needs of it.

    Attributes:
        image_token_id: each one of these in the token ids takes one feature of an image.
        typed_token_ids: tokens that the model's type ids mark.
        forbidden_token_ids: tokens that only a processor may write and no policy may sample.
    """

    def __init__(self, processor: Any, spec: ImageInputs) -> None:
        self.processor, self.spec = processor, spec
        self.image_token_id = _token_id(spec.feature_token, processor)
        self.typed_token_ids = frozenset(_known_token_ids(spec.typed_tokens, processor) or [self.image_token_id])
        reserved = _known_token_ids((processor.image_token, *spec.reserved), processor)
        self.forbidden_token_ids = frozenset({self.image_token_id, *self.typed_token_ids, *reserved})
        pad = processor.tokenizer.pad_token_id
        self.pad_token_id = int(pad if pad is not None else processor.tokenizer.eos_token_id)

    def process_image(self, image: Image.Image) -> dict[str, Tensor]:
        """The features of one image, on the CPU: what can be kept per distinct image.

        Raises:
            DataError: the processor refuses the image.
            ConfigurationError: the processor's outputs are not those that the family's entry declares.
        """
        features = process_one(self.processor, to_rgb(image), self.image_token_id)
        found = image_features(features).keys()
        if found != self.spec.joins.keys():
            raise ConfigurationError(
                f"the image processor returns {sorted(found)}, its entry declares {sorted(self.spec.joins)}",
                code="processor_outputs_mismatch",
                where=type(self.processor).__name__,
                remedy="declare every output in ImageInputs.joins",
            )
        return features

    def join(self, features: Sequence[Features], names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Model inputs of several images, equal to what the processor returns for all of them at once.

        `names`: which ones, of those that the family has; None: all.
        """
        if not features:
            return {}
        joins = {name: join for name, join in self.spec.joins.items() if names is None or name in names}
        return {name: join([one[name] for one in features], features) for name, join in joins.items()}

    def collate(self, samples: Sequence[Sample], images: ImageSource) -> MultimodalBatch:
        """`collate_features` with each distinct image opened and processed once."""
        return self.collate_features(samples, cache(lambda ref: self.process_image(images(ref))))

    def collate_features(self, samples: Sequence[Sample], features: Callable[[ImageRef], Features]) -> MultimodalBatch:
        """The right-padded batch of `samples`, row by row in order; `features` gives `process_image` of an image.

        Raises:
            DataError: no samples, or a row's placeholders are not those that its images need.
        """
        batch = self.rows(samples)
        of_rows = [[features(ref) for ref in sample.images] for sample in samples]
        for sample, of_row in zip(samples, of_rows, strict=True):
            self.check_row(sample, of_row)
        self.add_images(batch, [one for of_row in of_rows for one in of_row])
        return batch

    def rows(self, samples: Sequence[Sample]) -> MultimodalBatch:
        """The right-padded batch without what comes from images.

        Raises:
            DataError: no samples.
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
        """Give a batch the model inputs of images, in order."""
        joined = self.join(features)
        batch.pixel_values = joined.pop("pixel_values", None)
        batch.extra_model_kwargs |= joined

    def check_row(self, sample: Sample, features: Sequence[Features]) -> None:
        """
        Raises:
            DataError: the sample's placeholders are not those that its images need.
        """
        runs = [run for one in features for run in one[PLACEHOLDER_RUNS].tolist()]
        if not runs_fit(sample.input_ids, self.image_token_id, runs):
            found = int((sample.input_ids == self.image_token_id).sum())
            raise DataError(
                f"{found} image tokens for {len(features)} images that need {sum(runs)}, in runs of {runs[:8]}",
                code="image_tokens_mismatch",
                where=f"sample {sample.sample_id}",
                remedy="use the processor (and its image size) that the samples were built with",
            )


def _token_id(token: str, processor: Any) -> int:
    """The id of `token`, a text or a path as in `ImageInputs`.

    Raises:
        ConfigurationError: the processor has no such attribute, or the tokenizer no such token.
    """
    text: Any = token
    if token.startswith("."):
        text = processor
        for name in token[1:].split("."):
            text = getattr(text, name, None)
    known = processor.tokenizer.get_vocab()
    if not isinstance(text, str) or text not in known:
        raise ConfigurationError(
            f"the tokenizer has no token {text if isinstance(text, str) else token!r}, which stands for images",
            code="image_token_missing",
            where=f"{type(processor).__name__} with {len(known)} tokens",
            remedy="load the processor that belongs to the model, or add its family: docs/extending.md",
        )
    return int(known[text])


def _known_token_ids(tokens: tuple[str, ...], processor: Any) -> list[int]:
    """The ids of those `tokens` that the tokenizer has: some checkpoints of a family lack some."""
    known = processor.tokenizer.get_vocab()
    return [int(known[token]) for token in tokens if token in known]
