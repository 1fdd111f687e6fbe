"""Controllers are compiled by the first simulator of a machine alone."""

from __future__ import annotations

import pytest

from components.environments.libero.compiled import FOLDER, compile_once

from .simulated import needs_libero

pytestmark = needs_libero


class FirstSteps:
    """Counts resets; the first `failing` of them fail."""

    def __init__(self, failing: int = 0) -> None:
        self.resets, self.failing = 0, failing

    def reset(self, initial_state: int, seed: int) -> None:
        self.resets += 1
        if self.resets <= self.failing:
            raise OSError("no space left")


def test_the_first_steps_are_taken_once(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    first, second = FirstSteps(failing=1), FirstSteps()
    with pytest.raises(OSError, match="no space"):
        compile_once(first)
    compile_once(first)
    compile_once(second)
    assert (first.resets, second.resets) == (2, 0)
