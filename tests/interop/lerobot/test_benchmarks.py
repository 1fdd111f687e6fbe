"""LeRobot's halves of the GPU benchmark run beside ours, at toy sizes. MolmoAct2's refuses an older LeRobot."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import lerobot_gpu

from .conftest import PYTHON

HALF = Path(lerobot_gpu.__file__).with_name("policy_lerobot.py")
HAS_COMPILE = (
    "from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config as c;"
    "raise SystemExit('compile_model' not in c.__dataclass_fields__)"
)


def old() -> bool:
    """Return True if LeRobot is the released 0.6.1, which `make interop` installs. The benchmark needs LeRobot's main
    branch of August 2026."""
    return subprocess.run([PYTHON, "-c", HAS_COMPILE]).returncode != 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU gets the released sizes")
def test_both_sides_of_the_policy_benchmark_do_equal_work(tmp_path, monkeypatch):
    if old():
        refused = subprocess.run([PYTHON, HALF, "small"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert refused.returncode == 1 and "compile_model" in refused.stderr
        pytest.skip("the installed LeRobot has no compile_model")
    monkeypatch.setenv("ARMATURE_LEROBOT_PYTHON", str(PYTHON))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(lerobot_gpu, "ROUNDS", 1)
    lerobot_gpu.main(["plain", "full 8"])
    (row,) = json.loads((tmp_path / "lerobot.json").read_text())["rows"]
    assert row["ours_loss"] == pytest.approx(row["theirs_loss"], rel=0.01)
    assert row["ratio"] > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU gets the released sizes")
def test_both_sides_of_the_smolvla_benchmark_do_equal_work(tmp_path, monkeypatch):
    """LeRobot's half is `smolvla_lerobot`."""
    monkeypatch.setenv("ARMATURE_LEROBOT_PYTHON", str(PYTHON))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(lerobot_gpu, "ROUNDS", 1)
    lerobot_gpu.main(["smolvla", "plain", "full 8 float32", "answer 1 bfloat16"])
    rows = json.loads((tmp_path / "lerobot.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["full 8 float32", "answer 1 bfloat16"]
    assert rows[0]["ours_loss"] == pytest.approx(rows[0]["theirs_loss"], rel=1e-5)
    assert rows[0]["ours_trained"] == rows[0]["theirs_trained"]
    for row, close in zip(rows, (1e-5, 0.01), strict=True):
        assert row["ours_norm"] == pytest.approx(row["theirs_norm"], rel=close)
