"""Checks of a batch before it reaches a model, and the keyword arguments that it becomes."""

from __future__ import annotations

import torch
from torch import Tensor

from armature.components.contracts.batches import MultimodalBatch
from armature.components.contracts.errors import DataError

REMEDY = "correct the adapter's build_batch; armature.components.contracts.batches.MultimodalBatch names every shape"
INTEGERS = (torch.int64, torch.int32)


def model_inputs(batch: MultimodalBatch) -> dict[str, Tensor]:
    """The keyword arguments of the model's forward; `pixel_values` only if there are any."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if batch.pixel_values is not None:
        inputs["pixel_values"] = batch.pixel_values
    return inputs | batch.extra_model_kwargs


def validate_batch(batch: MultimodalBatch) -> MultimodalBatch:
    """`batch` itself, if its tensors fit together.

    Raises:
        DataError: a field is not a tensor, has another shape, dtype or value than it must have.
    """
    ids = _tensor("input_ids", batch.input_ids)
    if ids.ndim != 2 or 0 in ids.shape or ids.dtype not in INTEGERS:
        raise DataError(
            f"input_ids must be (B, L) integers with B, L >= 1, found {_describe(ids)}",
            code="invalid_input_ids",
            where="MultimodalBatch.input_ids",
            remedy=REMEDY,
        )
    rows, length = ids.shape
    _shape("attention_mask", batch.attention_mask, (rows, length))
    _shape("loss_mask", batch.loss_mask, (rows, length))
    _shape("behavior_logprobs", batch.behavior_logprobs, (rows, length))
    _shape("rewards", batch.rewards, (rows,))
    if batch.advantages is not None:
        _shape("advantages", batch.advantages, (rows, length))
        _finite("advantages", batch.advantages)
    _finite("rewards", batch.rewards)
    _finite("behavior_logprobs", batch.behavior_logprobs)
    _masks(batch)
    if batch.pixel_values is not None:
        pixels = _tensor("pixel_values", batch.pixel_values)
        if pixels.ndim < 2 or not pixels.is_floating_point():
            raise DataError(
                f"pixel_values must be floating point with at least 2 dims, found {_describe(pixels)}",
                code="invalid_pixel_values",
                where="MultimodalBatch.pixel_values",
                remedy="pass the image processor's output unchanged, or None where no row has an image",
            )
        _finite("pixel_values", pixels)
    for name, value in batch.extra_model_kwargs.items():
        _tensor(f"extra_model_kwargs[{name!r}]", value)
        if name.endswith("token_type_ids"):
            _shape(f"extra_model_kwargs[{name!r}]", value, (rows, length))
    return batch


def _masks(batch: MultimodalBatch) -> None:
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
            f"loss_mask is set on the first token of {int(trained[:, 0].sum())} rows, which nothing predicts",
            code="first_token_trained",
            where="MultimodalBatch.loss_mask",
            remedy="column j of every (B, L) tensor describes token j: check for a shift by one",
        )
    if (batch.behavior_logprobs[trained] > 1e-3).any():
        raise DataError(
            f"behavior_logprobs is {float(batch.behavior_logprobs[trained].max()):.4g} on a sampled token",
            code="logprob_positive",
            where="MultimodalBatch.behavior_logprobs",
            remedy="pass log-probabilities, which are at most 0",
        )


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise DataError(
            f"{name} must be a torch.Tensor, found {type(value).__name__}",
            code="tensor_missing",
            where=f"MultimodalBatch.{name}",
            remedy=REMEDY,
        )
    return value


def _shape(name: str, value: object, expected: tuple[int, ...]) -> None:
    tensor = _tensor(name, value)
    if tuple(tensor.shape) != expected:
        raise DataError(
            f"{name} must have shape {expected}, found {tuple(tensor.shape)}",
            code="batch_shape_mismatch",
            where=f"MultimodalBatch.{name}, beside input_ids of {'(B, L)' if len(expected) == 2 else 'B rows'}",
            remedy=REMEDY,
        )


def _finite(name: str, tensor: Tensor) -> None:
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise DataError(
            f"{name} has {bad} of {tensor.numel()} values that are NaN or infinite",
            code="batch_not_finite",
            where=f"MultimodalBatch.{name}",
            remedy="drop the rows that they come from",
        )


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
