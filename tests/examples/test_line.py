"""examples/line.py is a line whose shortest way earns its length, and its recipe plays it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from armature.components.configuration import load_recipe
from armature.components.environments.gymnasium.settings import GymnasiumSettings

ROOT = Path(__file__).resolve().parents[2]


def test_line_ends_above_its_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(ROOT / "examples")
    recipe = load_recipe(str(ROOT / "examples/line.toml"))
    args = GymnasiumSettings.model_validate(recipe.sections["environment"].args)
    __import__(*args.modules)
    env = gymnasium.make(args.id, render_mode="rgb_array")
    for seed in range(20):
        (at, goal), _ = env.reset(seed=seed)
        frame, total, ended = env.render(), 0.0, False
        red, green = (
            np.flatnonzero((frame[row] == color).all(1)) for row, color in ((0, (220, 60, 60)), (27, (60, 220, 60)))
        )
        assert (red[0] // 4, green[0] // 4) == (at, goal) and at != goal
        for _ in range(abs(goal - at)):
            assert not ended
            _, reward, ended, _, _ = env.step(args.actions.index("right" if goal > at else "left"))
            total += reward
        assert ended and total == abs(goal - at)
        assert abs(goal - at) <= args.max_turns
    sys.modules.pop("line")
