"""robosuite's controllers, compiled by one process of a machine for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from armature.components.artifacts.cache import DownloadCache, make_once

FOLDER = "NUMBA_CACHE_DIR"
"""Numba's variable with the folder of what it has compiled."""


def use_folder() -> None:
    """Before Numba is imported. Its own choice is beside robosuite's files, where not everybody may write."""
    os.environ.setdefault(FOLDER, str(DownloadCache.standard().folder / "numba"))


def compile_once(first_steps: Callable[[], None]) -> None:
    """Let a simulator take its first steps, unless a process has: they compile, which takes 25 s of a core.

    Processes that start together would all compile. Here one does, and the others wait for it.
    """
    from llvmlite.binding import get_host_cpu_name

    name = "-".join([version("robosuite"), version("numba"), get_host_cpu_name()])
    make_once(Path(os.environ[FOLDER]) / name, lambda _: first_steps())
