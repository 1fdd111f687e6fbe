"""A line of seven places, as an environment of Gymnasium: a red bar moves to the place above the green one."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

PLACES, SIDE = 7, 4  # a frame is 28 pixels wide and high


class Line(gymnasium.Env[Any, Any]):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space, observation_space = Discrete(2), Box(0, PLACES - 1, (2,), int)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.goal = (int(place) for place in self.np_random.choice(PLACES, 2, replace=False))
        self.ground = self.np_random.integers(80, size=(28, 28, 3), dtype=np.uint8)
        return np.array([self.at, self.goal]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = abs(self.goal - self.at)
        self.at = min(max(self.at + (1 if action else -1), 0), PLACES - 1)
        distance = abs(self.goal - self.at)
        return np.array([self.at, self.goal]), float(before - distance), distance == 0, False, {}

    def render(self) -> Any:
        frame = self.ground.copy()
        frame[:14, SIDE * self.at : SIDE * (self.at + 1)] = 220, 60, 60
        frame[14:, SIDE * self.goal : SIDE * (self.goal + 1)] = 60, 220, 60
        return frame


gymnasium.register("Line-v0", Line)  # type: ignore[arg-type]
