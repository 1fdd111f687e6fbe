"""Batches of a custom adapter: valid ones are accepted, wrong fields are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armature.components.families.joins import pad_cat
from armature.components.models.adapters import MultimodalAdapter, MultimodalBatch, model_inputs, validate_batch
from tests.refusals import refused

from .conftest import outputs_of

ROWS, LENGTH, WORDS = 2, 5, 11


def batch(**changes: Any) -> MultimodalBatch:
    fields: dict[str, Any] = {
        "input_ids": torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 0]]),
        "behavior_logprobs": torch.tensor([[0, 0, 0, -0.5, -1], [0, 0, -2, -0.1, 0]]),
        "rewards": torch.tensor([1.0, 0.0]),
    }
    return MultimodalBatch(**(fields | changes))


class Own(MultimodalAdapter):
    """A minimal custom adapter. It has only one method, and its pixels have shape (B, 3, H, W)."""

    def build_batch(self, outputs: Any) -> MultimodalBatch:
        return batch(pixel_values=torch.zeros(len(outputs.trajectories), 3, 224, 224))


def test_custom_adapter_needs_one_method(qwen):
    for processor in (qwen.processor, qwen.processor.tokenizer):
        adapter = Own(processor)
        assert adapter.tokenizer is qwen.processor.tokenizer
        built = validate_batch(adapter.build_batch(outputs_of([], [])))
        dims = (built.input_ids, built.attention_mask, built.loss_mask, built.behavior_logprobs, built.rewards)
        assert {len(value) for value in (*dims, built.pixel_values)} == {2}
        assert built.pixel_values.ndim == 4
    with pytest.raises(TypeError):
        MultimodalAdapter(qwen.processor)  # type: ignore[abstract]


def test_model_inputs_pass_pixels_and_extra_inputs_unchanged():
    extra = {"image_sizes": torch.tensor([[224, 224], [336, 112]]), "image_embeddings": torch.randn(2, 7, 8)}
    pixels = torch.randn(48, 1176)
    inputs = model_inputs(validate_batch(batch(pixel_values=pixels, extra_model_kwargs=extra)))
    assert inputs.keys() == {"input_ids", "attention_mask", "pixel_values", *extra}
    assert all(inputs[name] is value for name, value in {**extra, "pixel_values": pixels}.items())


def test_model_inputs_without_images_have_no_pixels():
    inputs = model_inputs(validate_batch(batch()))
    assert inputs.keys() == {"input_ids", "attention_mask"}
    assert batch().extra_model_kwargs == {}
    assert batch().extra_model_kwargs is not batch().extra_model_kwargs


@pytest.mark.parametrize(
    ("field", "value", "code", "shown"),
    [
        ("input_ids", torch.zeros(5, dtype=torch.int64), "invalid_input_ids", ("(5,) int64",)),
        ("input_ids", torch.zeros(2, 5), "invalid_input_ids", ("(2, 5) float32",)),
        ("input_ids", torch.zeros(0, 5, dtype=torch.int64), "invalid_input_ids", ("(0, 5) int64",)),
        ("input_ids", [[1, 2]], "tensor_missing", ("list",)),
        ("attention_mask", torch.ones(2, 4), "batch_shape_mismatch", ((2, 5), (2, 4))),
        ("loss_mask", torch.zeros(1, 5), "batch_shape_mismatch", ((2, 5), (1, 5))),
        ("behavior_logprobs", torch.zeros(2, 4), "batch_shape_mismatch", ((2, 5), (2, 4))),
        ("behavior_logprobs", torch.full((2, 5), float("nan")), "batch_not_finite", ("10 of 10",)),
        ("behavior_logprobs", torch.full((2, 5), 0.5), "logprob_positive", ("0.5",)),
        ("rewards", torch.zeros(2, 1), "batch_shape_mismatch", ((2,), (2, 1))),
        ("rewards", torch.tensor([1.0, float("inf")]), "batch_not_finite", ("1 of 2",)),
        ("advantages", torch.zeros(2), "batch_shape_mismatch", ((2, 5), (2,))),
        ("loss_mask", torch.ones(2, 5), "padding_trained", ("1",)),
        ("loss_mask", torch.tensor([[1, 0, 0, 0, 0], [0] * 5]), "first_token_trained", ("1",)),
        ("pixel_values", torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "invalid_pixel_values", ("(2, 3, 8, 8) uint8",)),
        ("pixel_values", torch.zeros(5), "invalid_pixel_values", ("(5,)",)),
        ("pixel_values", torch.full((1, 3, 2, 2), float("nan")), "batch_not_finite", ("12 of 12",)),
        ("extra_model_kwargs", {"image_sizes": [[8, 8]]}, "tensor_missing", ("['image_sizes']", "list")),
        ("extra_model_kwargs", {"mm_token_type_ids": torch.zeros(2, 4)}, "batch_shape_mismatch", ((2, 5), (2, 4))),
    ],
)
def test_validate_batch_rejects_and_names_the_wrong_field(field, value, code, shown):
    wrong = batch(**{field: value})
    with refused(code, f"MultimodalBatch.{field}", *shown) as error:
        validate_batch(wrong)
    assert error.value.remedy


def test_pad_cat_pads_other_dims_with_zeros_at_the_end():
    small, large = torch.ones(1, 2, 1), torch.full((2, 1, 3), 2.0)
    joined = pad_cat([small, large], [])
    assert joined.tolist() == [[[1, 0, 0], [1, 0, 0]], [[2, 2, 2], [0, 0, 0]], [[2, 2, 2], [0, 0, 0]]]
