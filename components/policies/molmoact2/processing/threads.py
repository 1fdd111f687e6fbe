"""Observations are encoded in threads: most of it is resizing images, which other threads need not wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from armature.components.cpus import available_cpus

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_threads(function: Callable[[Given], Made], items: Sequence[Given]) -> list[Made]:
    """`function` of each item, in their order; the first error is raised."""
    return list(_threads().map(function, items)) if len(items) > 1 else [function(item) for item in items]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cpus(), "encode")
