"""For every family, batches equal the processor's own, and batched rows give the same results as single rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from armature.components.models.adapters import model_inputs, validate_batch
from tests.refusals import refused

from .conftest import outputs_of, says, turn_of

SIZES = ((100, 80), (64, 150), (200, 60), (230, 230))
TEXT_OUTPUTS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}


@pytest.fixture
def rows(tiny) -> list[tuple[list[Any], list[Any]]]:
    """Return pairs of a conversation and its images. A conversation has zero to three images, and one image occurs in
    two conversations."""
    a, b, c, d = (tiny.image(*size) for size in SIZES)
    return [
        ([says("Name a color.")], []),
        ([says(None, "What color is this?")], [a]),
        ([says(None, "Which of these", None, "is red?")], [b, c]),
        ([says(None, None, "The third", None, "is blue")], [d, a, b]),
    ]


@pytest.fixture
def outputs(tiny, rows) -> Any:
    answers = ("red", "green", "it is the assistant", "blue and yellow")
    return outputs_of(
        *([tiny.turn(messages, images, text)] for (messages, images), text in zip(rows, answers, strict=True))
    )


def test_samples_keep_the_rollout_s_tokens(tiny, outputs):
    samples, drops = tiny.adapter.samples(outputs)
    assert not drops
    assert len(samples) == 4
    for sample, trajectory in zip(samples, outputs.trajectories, strict=True):
        (turn,) = trajectory.turns
        start = len(turn.prompt_token_ids)
        assert np.array_equal(sample.input_ids[:start], turn.prompt_token_ids)
        assert np.array_equal(sample.input_ids[start:], turn.completion_token_ids)
        assert not sample.loss_mask[:start].any()
        assert sample.loss_mask[start:].all()
        assert np.array_equal(sample.behavior_logprobs[start:], turn.completion_logprobs)
        assert not sample.behavior_logprobs[:start].any()
        assert set(sample.policy_versions[:start]) == {-1}
        assert set(sample.policy_versions[start:]) == {3}
        assert sample.images == turn.images


@pytest.mark.parametrize("chosen", [(0,), (1,), (1, 2), (0, 2, 3), (3, 0, 1, 2)])
def test_collated_inputs_equal_the_processors_batch(tiny, rows, outputs, chosen):
    samples, _ = tiny.adapter.samples(outputs)
    batch = validate_batch(tiny.collate([samples[row] for row in chosen]))
    expected = without_filler(tiny.processed(*zip(*(rows[row] for row in chosen), strict=True)))
    inputs = model_inputs(batch)
    assert inputs.keys() == expected.keys()
    for name in expected.keys() - TEXT_OUTPUTS:
        assert inputs[name].dtype == expected[name].dtype
        assert torch.equal(inputs[name], expected[name]), name
    lengths = expected["attention_mask"].sum(1)
    for name in expected.keys() & TEXT_OUTPUTS - {"attention_mask"}:
        for mine, theirs, length in zip(inputs[name], expected[name], lengths, strict=True):
            assert torch.equal(mine[:length], theirs[:length]), name
    if chosen == (0,):
        assert batch.pixel_values is None


def without_filler(outputs: Any) -> Any:
    """Move the tiles of all rows to one row, without those that Idefics3's processor adds to rows with fewer tiles. The
    model does the same."""
    if "pixel_attention_mask" in outputs:
        real = outputs["pixel_attention_mask"].flatten(2).any(-1)
        for name in ("pixel_values", "pixel_attention_mask"):
            outputs[name] = outputs[name][real][None]
    return outputs


def test_image_token_count_equals_the_processor_s(tiny, rows):
    for size in SIZES:
        ref = tiny.image(*size)
        needed = tiny.collator.process_image(tiny.images[ref])["placeholder_runs"].sum()
        assert needed == (tiny.prompt([says(None)], [ref]) == tiny.collator.image_token_id).sum() > 0


def test_batched_rows_equal_single_rows(tiny, outputs):
    samples, _ = tiny.adapter.samples(outputs)
    batch = tiny.collate(samples)
    logits, grads = forward_and_backward(tiny.model, batch)
    total: dict[str, torch.Tensor] = {}
    for row, sample in enumerate(samples):
        alone, alone_grads = forward_and_backward(tiny.model, tiny.collate([sample]))
        torch.testing.assert_close(logits[row, : len(sample.input_ids)], alone[0], atol=1e-5, rtol=0)
        for name, grad in alone_grads.items():
            total[name] = total.get(name, 0) + grad
    assert grads.keys() == total.keys()
    assert any("vis" in name for name in grads)
    for name, grad in grads.items():
        scale = max(1.0, float(total[name].abs().max()))
        torch.testing.assert_close(grad / scale, total[name] / scale, atol=1e-5, rtol=0)


def test_training_mode_accepts_batches_with_and_without_images(tiny, outputs):
    samples, _ = tiny.adapter.samples(outputs)
    tiny.model.train()
    try:
        for chosen in ([0], [0, 1]):
            inputs = model_inputs(tiny.collate([samples[row] for row in chosen]))
            assert torch.isfinite(tiny.model(**inputs).logits).all()
    finally:
        tiny.model.eval()


def test_left_padding_equals_right_padding(tiny, outputs):
    samples, _ = tiny.adapter.samples(outputs)
    batch = tiny.collate(samples)
    inputs = model_inputs(batch)
    lengths = batch.attention_mask.sum(1)
    width = batch.input_ids.shape[1]
    left = {
        name: torch.stack([row.roll(int(width - length)) for row, length in zip(value, lengths, strict=True)])
        if value.shape == batch.input_ids.shape
        else value
        for name, value in inputs.items()
    }
    with torch.no_grad():
        of_right, of_left = tiny.model(**inputs).logits, tiny.model(**left).logits
    for right, other, length in zip(of_right, of_left, lengths, strict=True):
        torch.testing.assert_close(right[:length], other[-length:], atol=1e-5, rtol=0)


def test_merged_turn_with_a_new_image_keeps_earlier_logits(tiny):
    first, second = tiny.image(100, 80), tiny.image(64, 150)
    opening = tiny.turn([says(None, "What color is this?")], [first], "red")
    more = tiny.prompt([says("And this?", None)], [second])
    later = turn_of(
        np.concatenate([opening.prompt_token_ids, opening.completion_token_ids, more]),
        opening.completion_token_ids,
        images=(first, second),
        index=1,
    )
    (merged,), drops = tiny.adapter.samples(outputs_of([opening, later]))
    (alone,), _ = tiny.adapter.samples(outputs_of([opening]))
    assert not drops
    assert merged.loss_mask.sum() == 2 * len(opening.completion_token_ids)
    with torch.no_grad():
        of_both = tiny.model(**model_inputs(tiny.collate([merged]))).logits[0]
        of_first = tiny.model(**model_inputs(tiny.collate([alone]))).logits[0]
    torch.testing.assert_close(of_both[: len(of_first)], of_first, atol=1e-5, rtol=0)


def test_turns_with_placeholder_defects_are_dropped_individually(tiny, outputs):
    good = outputs.trajectories[2].turns[0]
    bad = [
        turn_of(good.prompt_token_ids, [*good.completion_token_ids, token], images=good.images)
        for token in sorted(tiny.collator.forbidden_token_ids)
    ]
    positions = np.flatnonzero(good.prompt_token_ids == tiny.collator.image_token_id)
    short = np.delete(good.prompt_token_ids, positions[0])
    long = np.insert(good.prompt_token_ids, positions[0], tiny.collator.image_token_id)
    wrong = [turn_of(ids, good.completion_token_ids, images=good.images) for ids in (short, long)]
    wrong.append(turn_of(good.prompt_token_ids, good.completion_token_ids, images=good.images[:1]))
    samples, drops = tiny.adapter.samples(outputs_of([good], *([one] for one in (*bad, *wrong)), [good]))
    assert [sample.trajectory_id for sample in samples] == ["t0", f"t{1 + len(bad) + len(wrong)}"]
    assert drops == {"placeholder_sampled": len(bad), "placeholder_mismatch": 3}


def test_collate_rejects_row_with_wrong_images(tiny, outputs):
    sample = tiny.adapter.samples(outputs)[0][2]
    with refused("image_tokens_mismatch", f"sample {sample.sample_id}"):
        tiny.collate([replace(sample, images=sample.images[:1])])


def forward_and_backward(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits, and the gradients of the sum of the sampled tokens' log-probs."""
    model.zero_grad()
    logits = model(**model_inputs(batch)).logits
    trained = batch.loss_mask[:, 1:]  # image tokens may have no row in the output head
    targets = batch.input_ids[:, 1:][trained]
    logits[:, :-1][trained].log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    grads = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return logits.detach(), grads
