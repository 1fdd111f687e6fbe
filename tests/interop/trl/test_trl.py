"""TRL's halves of the benchmarks run beside ours, at toy sizes on a CPU, in the environment that `make bench` makes."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import rl_step_gpu, step_gpu, sums, trl_step

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes are those of a CPU")]


def test_both_sides_of_the_step_benchmark_do_equal_work():
    """Norms of first gradients agree in every case, also where no two answers share a prompt, and however TRL treats
    activations. Without Liger, which is for GPUs.
    """
    cases = ("A", "Q", "U")
    ours = [f"{case},2000,packing{words}" for case in cases for words in ("", ",keep")]
    theirs = [f"fp32,0,{recompute},{case},16,2" for case in cases for recompute in (0, 1)]
    taken = step_gpu.sides(ours, theirs, 1, small=True)
    norms = {(one["side"], one["way"]): one["norm"] for one in taken}
    for case in cases:
        named = [norm for (_, way), norm in norms.items() if case in way.split(",")]
        assert len(named) == 4 and max(named) < 1.005 * min(named)
    rows = step_gpu.rows_of(taken)
    assert [(row["case"], row["kept"]) for row in rows] == [(case, saved) for case in cases for saved in (False, True)]
    assert all(row["computed"] < row["trl_computed"] for row in rows)


def test_small_step_runs_in_trl_and_here(monkeypatch):
    for name, value in {"ROWS": 2, "TOKENS": 4, "STEPS": 1, "ROUNDS": 1}.items():
        monkeypatch.setattr(trl_step, name, value)
    assert all(math.isfinite(row.ratio) for row in trl_step.measure())


@pytest.mark.parametrize("way", ["16,0,0", "16,1,0"])
def test_trl_side_of_the_whole_step_runs(way, tmp_path, monkeypatch):
    monkeypatch.setattr(rl_step_gpu, "STEPS", 1)
    question = rl_step_gpu.checkpoint(tmp_path / "model")
    result = rl_step_gpu.measured(way, tmp_path / "model", question, 0)
    assert len(result["seconds"]) == len(result["sampled"]) == 1 and all(result["norms"])


@pytest.mark.long
def test_trl_side_of_the_learning_curves_runs(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(sums, "SIZES", sums.Sizes(steps=1, every=1, heldout=2, train=2, groups=1))
    sums.write_for_trl(tmp_path)
    result = sums.theirs(0, tmp_path)
    assert set(result["accuracy"]) == {"0", "1"} and len(result["seconds"]) == 1
