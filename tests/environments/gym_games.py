"""Gymnasium environments for tests, as a user would register them: a line of numbers, and games that misbehave."""

from __future__ import annotations

import os
import random
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Text

NAMES = ("less", "more", "crash", "hang", "raise", "nan")


class Line(gymnasium.Env[Any, Any]):
    """A position from 0 to 9, which the actions move to a goal; the others of `NAMES` misbehave."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    observation_space = Box(0, 9, (1,), int)
    action_space = Discrete(len(NAMES), start=2)

    def __init__(self, chance: str = "seed", render_mode: str | None = None, ends: bool = True) -> None:
        self.render_mode, self._chance, self._ends = render_mode, chance, ends

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        draw = {
            "seed": lambda: self.np_random.integers(10, size=2).tolist(),
            "global": lambda: [random.randrange(10), int(np.random.randint(10))],
            "clock": lambda: [time.perf_counter_ns() % 10, os.urandom(1)[0]],
            "none": lambda: [3, 5],
        }[self._chance]
        self._at, self._goal = draw()
        return self._seen()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        match NAMES[action - 2]:
            case "crash":
                os._exit(3)
            case "hang":
                time.sleep(60)
            case "raise":
                raise LookupError("no such thing")
            case "nan":
                return *self._seen(), float("nan"), False, False, {}  # type: ignore[return-value]
            case name:
                self._at += 1 if name == "more" else -1
        observation, info = self._seen()
        if self._chance == "global":
            info["luck"] = random.random() + np.random.random()
        return observation, float(self._at == self._goal), self._ends and self._at == self._goal, False, info

    def render(self) -> Any:
        return np.full((8, 8, 3), 20 * (self._at % 10), np.uint8)

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        mask = np.array([self._at > 0, True, True, True, True, True], np.int8)
        return np.array([self._at]), {"goal": self._goal, "action_mask": mask, "solved": self._at == self._goal}


class Echo(gymnasium.Env[Any, Any]):
    """An environment whose actions are short texts in lower case; it rewards the word that it shows."""

    action_space = Text(8, charset="abcdefgh")
    observation_space = Text(8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._word = "".join(self.np_random.choice(list("abcdefgh"), 6))
        return self._word, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._word, float(action == self._word), True, False, {}


class Two(Line):
    """A line with an action space that names cannot express."""

    action_space = MultiDiscrete([2, 2])


for _game in (Line, Echo, Two):
    gymnasium.register(f"tests/{_game.__name__}-v0", _game)  # type: ignore[arg-type]
