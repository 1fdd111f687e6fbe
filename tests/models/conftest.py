"""Tiny checkpoints of every family, built once per session."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from armature.components.families.family import FAMILIES
from armature.components.models.tiny import make_tiny_checkpoint
from tests.family_table import ALL

EVERY_FAMILY = tuple(FAMILIES)
BY_HAND = () if ALL else ("qwen3.5-moe", "internvl3.5", "idefics3", "glm4v", "glm4v-moe", "gemma4")
"""Families whose slow tests run only with `ARMATURE_TEST_FAMILIES=all`, since each starts a server or trains.
docs/models.md has the results, see `tests.family_table`."""
PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # as this project's CPU servers set it
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a model family's tiny checkpoint."""
    root, built = tmp_path_factory.mktemp("checkpoints"), dict[str, Path]()

    def build(family: str) -> Path:
        if family not in built:
            built[family] = make_tiny_checkpoint(family, root / family, seed=0)
        return built[family]

    return build


@pytest.fixture
def images() -> list[Image.Image]:
    """Return two images that differ in color and shape."""
    return [Image.new("RGB", (100, 80), (200, 30, 30)), Image.new("RGB", (64, 150), (30, 30, 200))]


class Engine:
    """Client of a vLLM engine in another process, which answers one command at a time. See vllm_loop.py.

    If the process has ended, the command "start" starts another one.
    """

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "vllm.log").open("w")
        self._open()

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [PYTHON, Path(__file__).with_name("vllm_loop.py"), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env=os.environ | CPU, pass_fds=[theirs.fileno()], stdout=self._log, stderr=self._log
            )
        self._socket, self._lines = ours, ours.makefile("rw")

    def __call__(self, *command: Any) -> Any:
        if command[0] == "start" and self._process.poll() is not None:
            self._open()
        self._lines.write(json.dumps(command) + "\n")
        self._lines.flush()
        if not (line := self._lines.readline()):
            raise RuntimeError(f"vLLM died:\n{Path(self._log.name).read_text()[-6000:]}")
        return json.loads(line)

    def close(self) -> None:
        self._socket.close()
        self._lines.close()
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    if not PYTHON.exists():
        pytest.skip("needs .venv-vllm: make environments")
    made = Engine(tmp_path_factory.mktemp("engine"))
    yield made
    made.close()
