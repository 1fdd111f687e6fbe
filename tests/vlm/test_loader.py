"""Planning and loading micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.vlm.loader import MicroBatchLoader
from armature.components.vlm.packing import micro_batches, packed_micro_batches, share, updates
from tests.builders import make_sample

pytestmark = pytest.mark.waits

REF = ImageRef("0" * 64, "image/png", 4, 4)


LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 200), st.integers(1, 5), st.integers(1, 4))
@example([(1, 1), (1, 0), (1, 0)], 1, 1, 2)  # the last round has no images, so its dummies may not have any either
@settings(max_examples=200)
def test_plans_contain_all_rows_within_limits(lengths, max_tokens, max_rows, ranks):
    samples = [
        make_sample(prompt=length // 2, completion=length - length // 2, images=(REF,) * images)
        for length, images in lengths
    ]
    plan = micro_batches(samples, range(len(samples)), max_tokens, max_rows, ranks)
    assert sorted(row for micro in plan for row in micro.rows) == list(range(len(samples)))
    for micro in plan:
        padded = max(len(s.input_ids) for s in micro.samples) * len(micro.samples)
        assert len(micro.samples) == 1 or (padded <= max_tokens and len(micro.samples) <= max_rows)
    shares = [share(plan, rank, ranks) for rank in range(ranks)]
    assert len({len(mine) for mine in shares}) == 1
    rows = [row for mine in shares for micro in mine for row in micro.rows]
    assert sorted(row for row in rows if row >= 0) == list(range(len(samples)))
    for one_round in zip(*shares, strict=True):
        assert len({any(s.images for s in micro.samples) for micro in one_round}) == 1
        for micro in one_round:
            dummies = [s for s, row in zip(micro.samples, micro.rows, strict=True) if row < 0]
            assert not any(s.loss_mask.any() for s in dummies)


def test_updates_cover_batch():
    assert [list(rows) for rows in updates(5, 2)] == [[0, 1], [2, 3], [4]]
    assert [list(rows) for rows in updates(5, 0)] == [[0, 1, 2, 3, 4]]
    assert list(updates(0, 0)) == []


def test_workers_give_same_batches_and_process_images_once(tiny, tmp_path, monkeypatch):
    samples = tiny.samples(12, seed=0)
    plan = micro_batches(samples, range(12), 150, 3)
    packed = packed_micro_batches(samples, range(12), 150, 3, tiny.collator.image_token_id)
    assert len(plan) > 3
    processed: list[int] = []
    original = tiny.collator.process_image
    monkeypatch.setattr(tiny.collator, "process_image", lambda image: processed.append(1) or original(image))
    here = MicroBatchLoader(tiny.collator, tiny.images, 0)
    with here.batch():
        expected = list(here(plan)) + list(here(plan))
        packed_here = [batch for _, batch in here(packed)]
    assert len(processed) == len({ref.sha256 for sample in samples for ref in sample.images})
    monkeypatch.undo()
    direct = [tiny.collator.collate(micro.samples, tiny.images.open) for micro in plan]
    workers = MicroBatchLoader(tiny.collator, tiny.images, 2)
    with workers.batch():
        loaded = list(workers(plan)) + list(workers(plan))
        packed_loaded = [batch for _, batch in workers(packed)]
    for one, other in zip(packed_loaded, packed_here, strict=True):
        assert torch.equal(one.packing.keys, other.packing.keys) and one.packing.images == other.packing.images
        torch.testing.assert_close(one.pixel_values, other.pixel_values, rtol=0, atol=0)
    for (micro, batch), (micro_here, here_batch), straight in zip(loaded, expected, direct * 2, strict=True):
        assert micro.rows == micro_here.rows
        for other in (here_batch, straight):
            torch.testing.assert_close(batch.input_ids, other.input_ids, rtol=0, atol=0)
            torch.testing.assert_close(batch.pixel_values, other.pixel_values, rtol=0, atol=0)
            for name, value in batch.extra_model_kwargs.items():
                torch.testing.assert_close(value, other.extra_model_kwargs[name], rtol=0, atol=0)


def test_missing_image_error_reaches_caller_from_worker(tiny):
    sample = next(s for s in tiny.samples(4, seed=0) if s.images)
    lost = replace(sample, images=(replace(sample.images[0], sha256="f" * 64),))
    plan = micro_batches([lost], [0], 1000, 4)
    for workers in (0, 1):
        loader = MicroBatchLoader(tiny.collator, tiny.images, workers)
        with loader.batch(), pytest.raises(DataError) as caught:
            list(loader(plan))
        assert lost.images[0].sha256[:12] in caught.value.what and "Traceback" not in caught.value.what
