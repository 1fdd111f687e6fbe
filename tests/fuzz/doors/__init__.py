"""The doors through which foreign input comes in. Each takes one damaged input at a time.

A door is a context manager that yields `attempt(rng) -> bool`: True where the input was accepted, and then the door has
compared what it got with an independent reading; False where our code counted it as refused. An error of ours
(`ArmatureError`) is a refusal too; anything else that is raised is a finding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

Attempt = Callable[[random.Random], bool]


@dataclass(frozen=True)
class Door:
    """A door's module, its relative `share` of all inputs, and the `seconds` that one of its inputs may take."""

    module: str
    share: int
    seconds: float

    def open(self, folder: Path) -> AbstractContextManager[Attempt]:
        opened: AbstractContextManager[Attempt] = import_module(f"tests.fuzz.doors.{self.module}").door(folder)
        return opened


DOORS = {
    "images": Door("images", 8, 20.0),
    "answers": Door("answers", 6, 30.0),
    "recipes": Door("recipes", 8, 10.0),
    "artifacts": Door("artifacts", 6, 10.0),
    "checkpoints": Door("checkpoints", 3, 60.0),
    "policies": Door("policies", 3, 60.0),
    "observations": Door("observations", 6, 10.0),
    "games": Door("games", 6, 20.0),
    "datasets": Door("datasets", 5, 30.0),
    "environments": Door("environments", 6, 30.0),
    "tables": Door("tables", 6, 30.0),
    "trainer": Door("trainer", 5, 20.0),
    "workers": Door("workers", 8, 30.0),
    "planted": Door("planted", 0, 16.0),
}


class Silent(AssertionError):
    """A finding: a damaged input was accepted, but the result differs from an independent reading of it."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Silent(what)
