"""Click tasks of MiniWoB++ as an environment of Gymnasium: one click into a grid over the page, in a real browser."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import gymnasium
import miniwob
import numpy as np
from gymnasium.spaces import Box, Discrete
from miniwob.action import ActionTypes
from miniwob.reward import get_binary_reward
from PIL import Image

COLUMNS, ROWS = 4, 8
TOP, SIDE = 50, 160  # the first 50 rows of pixels show the question
FRAME, CONTRAST = 28, 8  # a button is 6 % darker than the page


@cache
def browser(task: str) -> Any:
    """Return this process's browser, which plays `task`."""
    gymnasium.register_envs(miniwob)
    return gymnasium.make(f"miniwob/{task}-v1", reward_processor=get_binary_reward)


@lru_cache(512)
def page(task: str, seed: int) -> tuple[str, Any, tuple[Any, ...]]:
    """Return the question of a page, its frame, and the elements that can be clicked."""
    seen, _ = browser(task).reset(seed=seed)
    small = Image.fromarray(seen["screenshot"][TOP:, :SIDE]).resize((FRAME, FRAME), Image.Resampling.BOX)
    frame = np.minimum((255 - np.asarray(small, int)) * CONTRAST, 255)
    elements = tuple(each for each in seen["dom_elements"] if each["tag"] in ("button", "input_text"))
    return seen["utterance"], frame.astype(np.uint8), elements


def click(task: str, seed: int, point: Any) -> bool:
    """Click on a point of a page, in pixels of the screen. Return the page's verdict."""
    shown = browser(task)
    shown.reset(seed=seed)
    _, reward, *_ = shown.step(shown.unwrapped.create_action(ActionTypes.CLICK_COORDS, coords=point))
    return bool(reward > 0)


class Clicks(gymnasium.Env[Any, Any]):
    """One page, one click. The elements' places say which cells of the grid are right; with `live`, the page does."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space, observation_space = Discrete(COLUMNS * ROWS), Box(0, 1)

    def __init__(self, task: str, live: bool = False, render_mode: str | None = None) -> None:
        self.task, self.live, self.render_mode = task, live, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        assert seed is not None
        self.seed = seed
        self.question, self.frame, self.elements = page(self.task, seed)
        return {"mission": self.question}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        row, column = divmod(int(action), COLUMNS)
        point = np.array([(column + 0.5) * SIDE / COLUMNS, TOP + (row + 0.5) * SIDE / ROWS], np.float32)
        return {}, float(click(self.task, self.seed, point) if self.live else self.is_inside(point)), True, False, {}

    def is_inside(self, point: Any) -> bool:
        corners = [np.concatenate([each["left"], each["top"]]) for each in self.elements]
        sizes = [np.concatenate([each["width"], each["height"]]) for each in self.elements]
        return any(((low <= point) & (point < low + size)).all() for low, size in zip(corners, sizes, strict=True))

    def render(self) -> Any:
        return self.frame


gymnasium.register("Clicks-v0", Clicks)  # type: ignore[arg-type]
