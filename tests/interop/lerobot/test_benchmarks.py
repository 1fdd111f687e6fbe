"""LeRobot's half of the GPU benchmark runs beside ours, at toy sizes on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import lerobot_gpu

from .conftest import PYTHON


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes are those of a CPU")
def test_both_sides_do_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_LEROBOT_PYTHON", str(PYTHON))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(lerobot_gpu, "ROUNDS", 1)
    lerobot_gpu.main(["plain", "full 8"])
    (row,) = json.loads((tmp_path / "lerobot.json").read_text())["rows"]
    assert row["ours_loss"] == pytest.approx(row["theirs_loss"], rel=0.01)
    assert row["ratio"] > 0
