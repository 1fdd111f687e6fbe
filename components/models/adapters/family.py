"""The adapter of all model families, and checks of a batch; families differ only in the `ImageInputs` of the
collator."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from armature.components.contracts.batches import MultimodalAdapter, MultimodalBatch, Sample, TurnAdvantages
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import MAX_LOGPROB, GenerateOutputs, Turn
from armature.components.models.adapters.collate import PLACEHOLDER_RUNS, ImageSource, SampleCollator, Shown, is_missing
from armature.components.models.adapters.sequences import merge_turns, runs_fit, sample_of, turn_defect

REMEDY = "correct the adapter's build_batch; armature.components.contracts.batches.MultimodalBatch names every shape"
INTEGERS = (torch.int64, torch.int32)


def model_inputs(batch: MultimodalBatch) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward for a batch; `pixel_values` only if the batch has images."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if batch.pixel_values is not None:
        inputs["pixel_values"] = batch.pixel_values
    return inputs | batch.extra_model_kwargs


def validate_batch(batch: MultimodalBatch) -> MultimodalBatch:
    """Check that a batch's tensors fit together, and return the batch.

    Raises:
        DataError: a field is not a tensor, or has a wrong shape, dtype or value.
    """
    ids = _check_tensor("input_ids", batch.input_ids)
    if ids.ndim != 2 or 0 in ids.shape or ids.dtype not in INTEGERS:
        raise DataError(
            f"input_ids must be (B, L) integers with B, L >= 1, found {_describe(ids)}",
            code="invalid_input_ids",
            where="MultimodalBatch.input_ids",
            remedy=REMEDY,
        )
    rows, length = ids.shape
    for name in ("attention_mask", "loss_mask", "behavior_logprobs"):
        _check_shape(name, getattr(batch, name), (rows, length))
    _check_shape("rewards", batch.rewards, (rows,))
    if batch.advantages is not None:
        _check_shape("advantages", batch.advantages, (rows, length))
        _check_finite("advantages", batch.advantages)
    _check_finite("rewards", batch.rewards)
    _check_finite("behavior_logprobs", batch.behavior_logprobs)
    _check_masks(batch)
    if batch.pixel_values is not None:
        pixels = _check_tensor("pixel_values", batch.pixel_values)
        if pixels.ndim < 2 or not pixels.is_floating_point():
            raise DataError(
                f"pixel_values must be floating point with at least 2 dims, found {_describe(pixels)}",
                code="invalid_pixel_values",
                where="MultimodalBatch.pixel_values",
                remedy="pass the image processor's output unchanged, or None if no row has an image",
            )
        _check_finite("pixel_values", pixels)
    for name, value in batch.extra_model_kwargs.items():
        _check_tensor(f"extra_model_kwargs[{name!r}]", value)
        if name.endswith("token_type_ids"):
            _check_shape(f"extra_model_kwargs[{name!r}]", value, (rows, length))
    return batch


def _check_masks(batch: MultimodalBatch) -> None:
    """Check that the loss mask covers only tokens that can be trained on, and that their log-probs are valid."""
    trained = batch.loss_mask.bool()
    if (trained & ~batch.attention_mask.bool()).any():
        raise DataError(
            f"loss_mask is set on {int((trained & ~batch.attention_mask.bool()).sum())} padding tokens",
            code="padding_trained",
            where="MultimodalBatch.loss_mask",
            remedy="set it on sampled tokens only",
        )
    if trained[:, 0].any():
        raise DataError(
            f"loss_mask is set on the first token of {int(trained[:, 0].sum())} rows, which the model does not predict",
            code="first_token_trained",
            where="MultimodalBatch.loss_mask",
            remedy="column j of every (B, L) tensor describes token j: check for a shift by one",
        )
    if (batch.behavior_logprobs[trained] > MAX_LOGPROB).any():
        raise DataError(
            f"behavior_logprobs is {float(batch.behavior_logprobs[trained].max()):.4g} on a sampled token",
            code="logprob_positive",
            where="MultimodalBatch.behavior_logprobs",
            remedy="pass log-probabilities, which are at most 0",
        )


def _check_tensor(name: str, value: object) -> Tensor:
    """Check that a field is a tensor, and return it."""
    if not isinstance(value, Tensor):
        raise DataError(
            f"{name} must be a torch.Tensor, found {type(value).__name__}",
            code="tensor_missing",
            where=f"MultimodalBatch.{name}",
            remedy=REMEDY,
        )
    return value


def _check_shape(name: str, value: object, expected: tuple[int, ...]) -> None:
    """Check the shape of a field."""
    tensor = _check_tensor(name, value)
    if tuple(tensor.shape) != expected:
        raise DataError(
            f"{name} must have shape {expected}, found {tuple(tensor.shape)}",
            code="batch_shape_mismatch",
            where=f"MultimodalBatch.{name}, beside input_ids of {'(B, L)' if len(expected) == 2 else 'B rows'}",
            remedy=REMEDY,
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    """Check that a field has no NaN or infinite values."""
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise DataError(
            f"{name} has {bad} of {tensor.numel()} values that are NaN or infinite",
            code="batch_not_finite",
            where=f"MultimodalBatch.{name}",
            remedy="drop the rows with these values",
        )


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


log = logging.getLogger(__name__)


class FamilyAdapter(MultimodalAdapter):
    """Turns rollouts into training samples of one family, and these into batches by its `collator`.

    Args:
        collator: makes tensors of samples.
        images: opens an image by its reference, as `ImageStore.open` does; needed only for rollouts with images.
        max_tokens: longest sequence in tokens. A turn that would end beyond it is dropped, so sequences of several
            turns are cut between turns, never inside an image or a completion.
    """

    def __init__(
        self, collator: SampleCollator, images: ImageSource | None = None, max_tokens: int | None = None
    ) -> None:
        super().__init__(collator.processor)
        self.collator, self.images, self.max_tokens = collator, images, max_tokens
        self._runs_of_size: dict[Hashable, tuple[int, ...]] = {}

    def samples(
        self, outputs: GenerateOutputs, advantages: TurnAdvantages | None = None
    ) -> tuple[list[Sample], Counter[str]]:
        """Return training sequences in order, and the number of dropped turns by reason.

        Only the defective turn is dropped. Other turns of its trajectory remain, and a later turn that extends an
        earlier one across it is still merged with that one; the dropped completion is then context.

        Args:
            advantages: advantage of each turn that is not dropped; None sets all to 0.
        """
        samples: list[Sample] = []
        drops: Counter[str] = Counter()
        runs: dict[ImageRef, tuple[int, ...] | str] = {}
        for trajectory in outputs.trajectories:
            good = []
            for turn in trajectory.turns:
                reason = "reward_not_finite" if not np.isfinite(trajectory.reward) else self._turn_defect(turn, runs)
                if reason is None:
                    good.append(turn)
                else:
                    drops[reason] += 1
            merged = merge_turns(good, self.collator.spec.merge_turns)
            made = (sample_of(trajectory, turns, advantages) for turns in merged)
            samples += [replace(one, input_ids=self.collator.as_image_tokens(one.input_ids)) for one in made]
        return samples, drops

    def _turn_defect(self, turn: Turn, runs: dict[ImageRef, tuple[int, ...] | str]) -> str | None:
        """Return the reason why a turn cannot be trained on, or None if it can. `runs` caches the result of `_runs` by
        image."""
        reason = turn_defect(turn, self.collator.forbidden_token_ids, self.max_tokens)
        if reason is not None:
            return reason
        needed: list[int] = []
        for ref in turn.images:
            if ref not in runs:
                runs[ref] = self._runs(ref)
            lengths = runs[ref]
            if isinstance(lengths, str):
                return lengths
            needed += lengths
        if not runs_fit(self.collator.as_image_tokens(turn.prompt_token_ids), self.collator.image_token_id, needed):
            return "placeholder_mismatch"
        return None

    def _runs(self, ref: ImageRef) -> tuple[int, ...] | str:
        """Return the lengths of the runs of feature tokens that an image needs. If the image cannot be used, return the
        reason.

        Each image is opened, since it may be damaged, but processed only once per size, which determines the runs. For
        a video, so do its times.
        """
        try:
            image = self._open(ref)
        except (DataError, OSError, KeyError) as error:
            log.warning("image %s dropped: %s", ref.sha256[:12], error)
            return "image_missing" if is_missing(error) else "image_unreadable"
        size = (*image.size, getattr(image, "times", ()))
        if size not in self._runs_of_size:
            try:
                self._runs_of_size[size] = tuple(self.collator.process_image(image)[PLACEHOLDER_RUNS].tolist())
            except DataError as error:
                log.warning("image %s dropped: %s", ref.sha256[:12], error)
                return "image_unprocessable"
        return self._runs_of_size[size]

    def _open(self, ref: ImageRef) -> Shown:
        if self.images is None:
            raise ConfigurationError(
                "the rollouts have images, but the adapter has no image store",
                code="image_store_missing",
                where=type(self).__name__,
                remedy="pass images=ImageStore(root).open to get_adapter",
            )
        return self.images(ref)

    def build_batch(self, outputs: GenerateOutputs) -> MultimodalBatch:
        """Return all samples of `outputs` as one batch without advantages, which the trainer computes from the rewards.

        Raises:
            DataError: every turn was dropped.
        """
        samples, drops = self.samples(outputs)
        if drops:
            log.warning("dropped %d turns: %s", drops.total(), dict(drops))
        if not samples:
            raise DataError(
                f"no turn is left to train on; dropped: {dict(drops)}",
                code="no_trainable_turn",
                where=f"{len(outputs.trajectories)} trajectories",
                remedy="look at the rollouts: every one has the defect that was counted",
            )
        return validate_batch(replace(self.collator.collate(samples, self._open), advantages=None))
