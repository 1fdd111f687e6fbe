"""Samples with their advantages, and the batch table against its rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.rollouts.batches.ratios import read_log_ratios, write_log_ratios
from armature.components.rollouts.batches.table import build_batch, read_batch, write_batch
from tests.builders import make_sample

from .conftest import GROUPS, batch_settings


def sample(of: Trajectory, length: int = 3, advantage: float = 0.0) -> Sample:
    """Return a sample of the trajectory `of` with one image. Only its last token is trained on."""
    image = ImageRef("a" * 64, "image/png", 4, 5)
    made = make_sample(of.trajectory_id, length - 1, 1, group_id=of.group_id, reward=of.reward, images=(image,))
    return replace(made, advantages=np.where(made.loss_mask, advantage, 0).astype(np.float32))


class OneSampleEach:
    """The simplest adapter: every trajectory is one sample, with the advantage of its last turn."""

    def samples(self, outputs, advantages):
        last = {
            each.trajectory_id: advantages[each.trajectory_id, len(each.turns) - 1] for each in outputs.trajectories
        }
        return [sample(each, 3, last[each.trajectory_id]) for each in outputs.trajectories], Counter(odd=1)


def test_batch_counts_every_drop():
    settings = batch_settings({"name": "group_mean", "scale": "none"})
    built = build_batch(GenerateOutputs(GROUPS), OneSampleEach(), settings)
    assert [each.sample_id for each in built.samples] == ["a", "b", "c"]
    assert built.drops == {"odd": 1, "zero_advantage_group": 3}
    assert built.samples[1].advantages.tolist() == [0.0, 0.0, -1.0]
    assert built.metrics["groups/zero_advantage_fraction"] == pytest.approx(2 / 3)


def test_batch_table_round_trip(tmp_path):
    write_batch(tmp_path, [])
    assert read_batch(tmp_path) == []
    samples = [sample(each, length) for each, length in zip(GROUPS, (3, 1, 7, 2, 4, 5), strict=True)]
    write_batch(tmp_path, samples)
    result = read_batch(tmp_path)
    for expected, actual in zip(samples, result, strict=True):
        for name, value in vars(expected).items():
            if isinstance(value, np.ndarray):
                assert np.array_equal(value, getattr(actual, name)) and value.dtype == getattr(actual, name).dtype
            else:
                assert value == getattr(actual, name)


SAMPLES = [make_sample("a"), make_sample("b"), make_sample("c", group_id="g1")]


def test_log_ratios_are_read_by_sample_and_group(tmp_path):
    path = tmp_path / "log_ratios/00001.parquet"
    saved = {2: np.array([0.5, np.nan], np.float32), 0: np.array([-0.25, 0.0], np.float32)}
    write_log_ratios(path, SAMPLES, saved)
    result = read_log_ratios(path)
    assert list(result) == ["a", "c"]  # nothing of "b" was trained on
    np.testing.assert_array_equal(result["a"], saved[0])
    np.testing.assert_array_equal(result["c"], saved[2])
    assert list(read_log_ratios(path, "g1")) == ["c"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_log_ratios_of_an_empty_step(tmp_path):
    path = tmp_path / "log_ratios/00001.parquet"
    write_log_ratios(path, SAMPLES, {})
    assert read_log_ratios(path) == {}


def test_incomplete_ratio_file_is_replaced(tmp_path):
    path = tmp_path / "log_ratios/00001.parquet"
    write_log_ratios(path, SAMPLES, {1: np.zeros(2, np.float32)})
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    path.with_suffix(".part").write_bytes(whole[:50])
    with pytest.raises(DataError) as caught:
        read_log_ratios(path)
    assert caught.value.where == str(path)
    write_log_ratios(path, SAMPLES, {1: np.zeros(2, np.float32)})
    assert path.read_bytes() == whole
