"""Attention masks, compared with their definition token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.robots.policies.molmoact2.modeling.layers import attention_mask, context_index, context_mask
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan, LossPlan
from tests.robots.policies.molmoact2.examples import ACTION_END, ACTION_START, CONFIG, EOS, as_batch, make_examples
from tests.robots.policies.plain import policy_settings

ROWS = [[1, 0], [2]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_attention_mask_is_causal_within_examples_and_bidirectional_in_images(bidirectional: bool, side: str) -> None:
    batch = as_batch(make_examples(3), ROWS, side=side, extra=2)
    mask = attention_mask(batch, bidirectional)
    rows, width = batch.input_ids.shape
    for row in range(rows):
        owner, image = batch.example_ids[row].tolist(), batch.image_tokens[row].tolist()
        for query in range(width):
            for key in range(width):
                both = bidirectional and image[query] and image[key]
                expected = owner[query] == owner[key] and (key <= query or both)
                assert bool(mask[row, 0, query, key]) == expected, (row, query, key)


@st.composite
def _rows_of_ids(draw: st.DrawFn) -> list[list[int]]:
    """Draw up to three examples with EOS and starts and ends of actions among their tokens, in any order."""
    token = st.sampled_from([7, 8, EOS, ACTION_START, ACTION_END])
    return draw(st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=3))


@settings(max_examples=60)
@given(_rows_of_ids(), st.booleans())
def test_context_mask_hides_eos_and_discrete_actions(ids: list[list[int]], left: bool) -> None:
    flat = [token for one in ids for token in one]
    owners = [owner for owner, one in enumerate(ids) for _ in one]
    gap = [0, 0]
    row = torch.tensor([gap + flat if left else flat + gap])
    owner_row = torch.tensor([[-1, -1, *owners] if left else [*owners, -1, -1]])
    batch = replace(as_batch(make_examples(1)), input_ids=row, example_ids=owner_row)
    expected: list[bool] = []
    for one in ids:
        inside = 0  # number of starts without an end so far
        for token in one:
            inside += token == ACTION_START
            expected.append(inside <= 0 and token != EOS)
            inside -= token == ACTION_END
    actual = context_mask(batch, True, CONFIG)[0].tolist()
    assert actual == ([False, False, *expected] if left else [*expected, False, False])
    everything = context_mask(batch, False, CONFIG)[0].tolist()
    assert everything == (owner_row[0] >= 0).tolist()


def test_context_index_lists_visible_tokens_in_order() -> None:
    batch = as_batch(make_examples(3, answer=True), ROWS, side="right", extra=1)
    visible = context_mask(batch, True, CONFIG)
    context = context_index(batch, visible)
    flat = torch.arange(visible.numel()).view(visible.shape)
    gathered = context.gather(flat[..., None])[..., 0]
    for example in range(batch.examples):
        expected = flat[visible & (batch.example_ids == example)].tolist()
        assert gathered[example][context.valid[example]].tolist() == expected
    longest = int(context.valid.sum(-1).max())
    assert context.valid.shape[1] == longest
    assert torch.equal(context_index(batch, visible, width=50).gather(flat[..., None])[:, :longest, 0], gathered)


@pytest.mark.parametrize(
    ("semantics", "mode", "bidirectional", "hides"),
    [
        ("head", "continuous", False, False),
        ("head", "both", False, True),
        ("head", "discrete", True, False),
        ("0.6.1", "continuous", True, True),
        ("seed", "continuous", True, True),
        ("seed", "both", True, True),
    ],
)
def test_each_version_uses_its_masks(semantics: str, mode: str, bidirectional: bool, hides: bool) -> None:
    chosen = policy_settings(semantics=semantics, action_mode=mode)
    plan = LossPlan.of(chosen)
    assert (plan.bidirectional_images, plan.hides_answers) == (bidirectional, hides)
    as_trained = InferencePlan.of(chosen, CONFIG)
    assert as_trained.bidirectional_images == bidirectional
    released = chosen.model_copy(update={"image_attention_at_inference": "bidirectional", "num_inference_steps": 3})
    assert InferencePlan.of(released, CONFIG).bidirectional_images
    assert (as_trained.steps, InferencePlan.of(released, CONFIG).steps) == (10, 3)


def test_no_example_attends_to_padding() -> None:
    batch = as_batch(make_examples(2), side="left", extra=3)
    mask, real = attention_mask(batch, True)[:, 0], batch.example_ids >= 0
    crossing = mask & (real[:, :, None] != real[:, None, :])
    assert not crossing.any()
    assert mask.any(-1).all()
    assert np.array_equal(real.sum(-1), [one.length for one in make_examples(2)])
