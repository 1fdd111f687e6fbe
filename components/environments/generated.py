"""The base of environments whose tasks are drawn from a seed."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from threading import Lock
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import numpy as np
from PIL import Image
from pydantic import AfterValidator, Field

from armature.components.artifacts.images import encode_png
from armature.components.contracts.episodes import Episode, Split, Task
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.settings import Settings

SettingsT = TypeVar("SettingsT", bound=Settings)


def task_seed(seed: int, split: Split, index: int) -> int:
    """A seed of its own for every task: even in the training split, odd in the held-out one, never twice."""
    return 2 * ((seed << 32) + index) + (split == "heldout")


class GeneratedEnvironment(ABC, Generic[SettingsT]):
    """An environment that makes `train_tasks` and `heldout_tasks` tasks from `seed`."""

    name: str
    Settings: ClassVar[type[Settings]]
    system_prompt: str | None = None
    dialogue: bool = True
    max_turns: int
    reward_weights: Mapping[str, float]

    def __init__(self, settings: SettingsT, *, train_tasks: int, heldout_tasks: int, seed: int, processes: int) -> None:
        self.settings = settings
        self.processes = processes
        self._counts = {"train": train_tasks, "heldout": heldout_tasks}
        self._seed = seed

    def tasks(self, split: Split) -> Iterator[Task]:
        for index in range(self._counts[split]):
            payload = self.payload(task_seed(self._seed, split, index), index)
            yield Task(f"{self.name}-{split}-{index:05d}", split, payload)

    @abstractmethod
    def payload(self, seed: int, index: int) -> dict[str, Any]:
        """What determines task `index`, as JSON; `seed` is the task's own."""

    def close(self) -> None:
        """Nothing was started."""

    @abstractmethod
    def episode(self, task: Task) -> Episode: ...


# Noisy images of one color, for environments that ask about colors.

Channel = Annotated[int, Field(ge=0, le=255)]
Palette = dict[str, tuple[Channel, Channel, Channel]]


def bare_answer(text: str) -> str:
    """`text` in lower case, without the white space and punctuation around it."""
    match = re.search(r"[^\W_](?:.*[^\W_])?", text, re.DOTALL)  # linear, as two substitutions are not
    return match.group().casefold() if match else ""


def _answerable(colors: Palette) -> Palette:
    for name in colors:
        if not name or bare_answer(name) != name:
            raise ValueError(f"{name!r} cannot be an answer: use a lower-case word without punctuation around it")
    return {name: colors[name] for name in sorted(colors, key=_place)}


def _place(name: str) -> tuple[int, str]:
    """Equal colors make equal tasks in whatever order they arrive: PostgreSQL keeps none for Prefect's parameters."""
    known = list(COLORS)
    return (known.index(name) if name in known else len(known), name)


COLORS: Palette = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 50),
    "orange": (240, 130, 30),
    "purple": (130, 40, 160),
    "white": (235, 235, 235),
    "black": (20, 20, 20),
}


class ColorImageSettings(Settings):
    """How images of a color look."""

    colors: Annotated[Palette, AfterValidator(_answerable)] = Field(COLORS, min_length=2)
    """The colors by name, e.g. {red = [220, 40, 40]}; names are the answers."""
    image_size: int = Field(56, ge=8, le=2048)
    """Width and height of an image in pixels."""
    noise: float = Field(16.0, ge=0, le=255)
    """Standard deviation of each pixel's noise, of 255 levels."""
    tint_jitter: float = Field(12.0, ge=0, le=255)
    """Largest shift of a whole image's red, green and blue, each, of 255 levels."""
    brightness_jitter: float = Field(0.12, ge=0, lt=1)
    """Largest change of a whole image's brightness, as a part of it."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.colors)


def color_image(color: str, seed: int, settings: ColorImageSettings) -> EncodedImage:
    """A PNG of `color`, the same for the same arguments."""
    random = np.random.default_rng(seed)
    brightness = 1 + settings.brightness_jitter * random.uniform(-1, 1)
    tint = settings.tint_jitter * random.uniform(-1, 1, 3)
    noise = settings.noise * random.standard_normal((settings.image_size, settings.image_size, 3))
    pixels = brightness * np.array(settings.colors[color]) + tint + noise
    return encode_png(Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8)))


def painter(settings: ColorImageSettings) -> Callable[[str, int], EncodedImage]:
    """`color_image` with these settings; the last images are kept, as a whole group asks for the same one.

    Threads that ask at the same time have it drawn once.
    """
    draw, one_at_a_time = lru_cache(maxsize=32)(partial(color_image, settings=settings)), Lock()

    def paint(color: str, seed: int) -> EncodedImage:
        with one_at_a_time:
            return draw(color, seed)

    return paint


def color_reward(action: str, color: str, settings: ColorImageSettings) -> dict[str, float]:
    """`correct`: the answer is the color's name and nothing else; `format`: it is one of the names."""
    answer = bare_answer(action)
    return {"correct": float(answer == color), "format": float(answer in settings.colors)}
