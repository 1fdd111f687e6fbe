"""What is kept of every step's tokens is read back by sample, and what is damaged is said."""

from __future__ import annotations

import numpy as np
import pytest

from armature.components.batches.ratios import read_log_ratios, write_log_ratios
from armature.components.contracts.errors import DataError
from tests.builders import make_sample

SAMPLES = [make_sample("a"), make_sample("b"), make_sample("c", group_id="g1")]


def test_ratios_are_found_by_sample_and_by_group(tmp_path):
    path = tmp_path / "log_ratios/00001.parquet"
    kept = {2: np.array([0.5, np.nan], np.float32), 0: np.array([-0.25, 0.0], np.float32)}
    write_log_ratios(path, SAMPLES, kept)
    found = read_log_ratios(path)
    assert list(found) == ["a", "c"]  # nothing of "b" was trained on
    np.testing.assert_array_equal(found["a"], kept[0])
    np.testing.assert_array_equal(found["c"], kept[2])
    assert list(read_log_ratios(path, "g1")) == ["c"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_step_that_trained_on_nothing(tmp_path):
    path = tmp_path / "log_ratios/00001.parquet"
    write_log_ratios(path, SAMPLES, {})
    assert read_log_ratios(path) == {}


def test_a_half_written_file_is_not_read_and_is_replaced(tmp_path):
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
