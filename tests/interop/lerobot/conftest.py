"""LeRobot runs in an environment of its own, which `make interop` makes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.robots.datasets.conftest import cache, written

__all__ = ["cache", "datasets_side", "policies_side", "written"]

PYTHON = Path(__file__).parents[3] / ".venv-lerobot/bin/python"

Side = Callable[..., None]
"""A function that calls a function in LeRobot's environment. Its arguments are the name of that function and then its
arguments."""


@contextmanager
def side(name: str, log: Path) -> Iterator[Side]:
    """Run a program of this folder in LeRobot's environment, and yield a function that sends it calls.

    It is one process for all calls, because importing LeRobot takes longer than the calls.
    """
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(log.parent / "hf"), "SVT_LOG": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [PYTHON, Path(__file__).with_name(name)],
            env={**os.environ, **offline, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None

        def ask(*order: str | Path) -> None:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps([str(word) for word in order]), file=process.stdin, flush=True)
            while (line := process.stdout.readline()) not in ("", "done\n"):
                pass
            assert line, log.read_text()[-3000:]

        yield ask
        process.stdin.close()


@pytest.fixture(scope="module")
def datasets_side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    with side("datasets_side.py", tmp_path_factory.mktemp("lerobot") / "log") as ask:
        yield ask


@pytest.fixture(scope="module")
def policies_side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    with side("policies_side.py", tmp_path_factory.mktemp("lerobot") / "log") as ask:
        yield ask
