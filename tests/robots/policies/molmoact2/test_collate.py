"""Batches contain every token, position, patch and action of their examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.robots.policies.molmoact2.processing.batch import Example, PolicyBatch, collate, pack
from tests.refusals import refused

PAD, PATCHES, PIXELS, HORIZON, WIDTH = 7, 9, 6, 4, 3


def example(length: int, crops: int, seed: int) -> Example:
    rng = np.random.default_rng([seed, length, crops])
    return Example(
        input_ids=rng.integers(8, 90, length),
        image_tokens=rng.random(length) < 0.5,
        pixel_values=rng.integers(0, 256, (crops, PATCHES, PIXELS), dtype=np.uint8),
        pooling=rng.integers(-1, max(1, crops * PATCHES), (crops * 2, 4)),
        labels=rng.integers(-100, 90, length),
        actions=rng.normal(size=(HORIZON, WIDTH)).astype(np.float32),
        horizon_padding=rng.random(HORIZON) < 0.5,
        dimension_padding=rng.random(WIDTH) < 0.5,
    )


def unbatch(batch: PolicyBatch, number: int) -> Example:
    """Restore example `number` from the batch, using only the indices in the batch."""
    row = int(batch.rows[number])
    owned = (batch.example_ids == number).numpy()
    assert owned.any(axis=1).nonzero()[0].tolist() == [row]
    assert batch.position_ids[row][owned[row]].tolist() == list(range(owned[row].sum()))
    assert batch.labels is not None and batch.actions is not None and batch.horizon_padding is not None
    return Example(
        input_ids=batch.input_ids[row].numpy()[owned[row]],
        image_tokens=batch.image_tokens[row].numpy()[owned[row]],
        pixel_values=np.zeros(0, np.uint8),
        pooling=np.zeros(0, np.int64),
        labels=batch.labels[row].numpy()[owned[row]],
        actions=batch.actions[number].numpy(),
        horizon_padding=batch.horizon_padding[number].numpy(),
        dimension_padding=batch.dimension_padding[number].numpy(),
    )


def assert_holds(batch: PolicyBatch, examples: list[Example]) -> None:
    assert batch.examples == len(examples)
    for number, wanted in enumerate(examples):
        unbatched = unbatch(batch, number)
        for name, value in vars(wanted).items():
            if name not in ("pixel_values", "pooling"):
                assert np.array_equal(getattr(unbatched, name), value), name
    pads = (batch.example_ids == -1).numpy()
    assert batch.labels is not None
    assert (batch.input_ids.numpy()[pads] == PAD).all() and (batch.labels.numpy()[pads] == -100).all()
    assert not batch.image_tokens.numpy()[pads].any() and not batch.position_ids.numpy()[pads].any()
    # Each image token must pool the patches of its own example.
    pixels, start = batch.pixel_values.numpy().reshape(-1, PIXELS), 0
    for wanted in examples:
        rows = batch.pooling.numpy()[start : start + len(wanted.pooling)]
        patches = wanted.pixel_values.reshape(-1, PIXELS)
        assert np.array_equal(rows < 0, wanted.pooling < 0)
        assert np.array_equal(pixels[rows[rows >= 0]], patches[wanted.pooling[wanted.pooling >= 0]])
        start += len(rows)
    assert start == len(batch.pooling)


SHAPES = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=7)


@settings(max_examples=40)
@given(shapes=SHAPES, side=st.sampled_from(["left", "right"]), multiple=st.sampled_from([1, 8]))
def test_collated_rows_hold_one_example_each(shapes: list[tuple[int, int]], side: str, multiple: int) -> None:
    examples = [example(*shape, seed) for seed, shape in enumerate(shapes)]
    batch = collate(examples, side, multiple, PAD)  # type: ignore[arg-type]
    assert_holds(batch, examples)
    assert batch.rows.tolist() == list(range(len(examples)))
    owned = (batch.example_ids >= 0).numpy()
    assert owned[:, -1 if side == "left" else 0].all()
    width, longest = batch.input_ids.shape[1], max(length for length, _ in shapes)
    assert width % multiple == 1 % multiple and longest <= width < longest + multiple


@settings(max_examples=40)
@given(shapes=SHAPES, data=st.data())
def test_packed_rows_hold_their_examples(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    examples = [example(*shape, seed) for seed, shape in enumerate(shapes)]
    order = data.draw(st.permutations(range(len(examples))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order) - 1) if len(order) > 1 else st.nothing())))
    rows = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    batch = pack(examples, rows, 8, PAD)
    assert_holds(batch, [examples[index] for index in order])
    assert batch.rows.tolist() == [row for row, members in enumerate(rows) for _ in members]
    width = max(sum(examples[index].length for index in row) for row in rows)
    assert width <= batch.input_ids.shape[1] < width + 8


def test_batch_without_labels_and_actions_has_none() -> None:
    asked = replace(example(5, 1, 0), labels=None, actions=None, horizon_padding=None)
    batch = collate([asked, asked], "left", 8, PAD)
    assert batch.labels is None and batch.actions is None and batch.horizon_padding is None
    assert batch.to("cpu").examples == 2


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"labels": None}, ["labels"]),
        ({"actions": None}, ["actions"]),
        ({"actions": np.zeros((2, WIDTH), np.float32)}, ["actions", (2, 3), (4, 3)]),
    ],
    ids=["labels", "actions", "horizon"],
)
def test_rejects_examples_that_differ(changes: dict[str, Any], shown: list[object]) -> None:
    one = example(5, 1, 0)
    with refused("examples_differ", *shown):
        pack([one, replace(one, **changes)], [[0, 1]], 8, PAD)


def test_rejects_empty_batch() -> None:
    with refused("empty_batch"):
        collate([], "left", 8, PAD)
