"""`python -m tests.chaos` removes the folder that it made after a good run, and keeps everything else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tests.chaos.__main__ as command


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("place", ["temporary", "new", "existing"])
def test_run_leaves_a_clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, passed: bool) -> None:
    class Quick:
        """A replacement of a training, which takes minutes. It writes the files that a training would write."""

        expected = "weights"

        def __init__(self, folder: Path) -> None:
            (folder / "inputs").mkdir(parents=True)

        def __enter__(self) -> Quick:
            return self

        def __exit__(self, *_: object) -> None: ...

        def disturb(self, seed: int) -> SimpleNamespace:
            return SimpleNamespace(passed=passed)

    monkeypatch.setattr(command, "Chaos", Quick)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if place == "existing":
        (tmp_path / "existing").mkdir()
    words = [] if place == "temporary" else ["--folder", str(tmp_path / place)]
    monkeypatch.setattr(sys, "argv", ["chaos", "--runs", "1", *words])
    assert command.main() == (not passed)
    assert bool(list(tmp_path.glob("*"))) == (place == "existing" or not passed)
