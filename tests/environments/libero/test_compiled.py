"""Controllers are compiled by the first simulator of a machine alone."""

from __future__ import annotations

import pytest

from armature.components.environments.libero.compiled import FOLDER, compile_once

from .simulated import needs_libero

pytestmark = needs_libero


def test_the_first_steps_are_taken_once(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    taken = []

    def steps(failing):
        taken.append(failing)
        if failing:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compile_once(lambda: steps(failing=True))
    compile_once(lambda: steps(failing=False))
    compile_once(lambda: steps(failing=False))
    assert taken == [True, False]
