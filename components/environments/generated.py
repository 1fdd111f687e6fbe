"""The base class of environments that generate their tasks from a seed, and color images for two of them."""

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


class GeneratedEnvironment(ABC, Generic[SettingsT]):
    """An environment that generates `train_tasks` and `heldout_tasks` tasks from `seed`.

    A subclass defines `payload`, which describes a task as JSON, and `episode`, which plays it.

    Example:
        >>> class Digits(GeneratedEnvironment[Settings]):
        ...     name = "digits"
        ...     def payload(self, seed, index):
        ...         return {"digit": seed % 10}
        ...     def episode(self, task):
        ...         raise NotImplementedError
        >>> environment = Digits(Settings(), train_tasks=2, heldout_tasks=1, seed=0, processes=1)
        >>> [(task.task_id, task.payload) for task in environment.tasks("train")]
        [('digits-train-00000', {'digit': 0}), ('digits-train-00001', {'digit': 2})]
    """

    name: str
    Settings: ClassVar[type[Settings]]
    draws_only: ClassVar[bool] = False
    """True if whatever the settings say, they start no program, read no file, ask no server, and name no code."""
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
        """Yield the tasks of a split. Each has a seed that no other task has: even for training, odd for held-out."""
        for index in range(self._counts[split]):
            seed = 2 * ((self._seed << 32) + index) + (split == "heldout")
            yield Task(f"{self.name}-{split}-{index:05d}", split, self.payload(seed, index))

    @abstractmethod
    def payload(self, seed: int, index: int) -> dict[str, Any]:
        """Return the JSON values that determine task `index`; `seed` is a seed that only this task has."""

    def close(self) -> None:
        """Release what the environment holds; by default nothing."""

    @abstractmethod
    def episode(self, task: Task) -> Episode: ...


# --- Noisy images of one color, for environments that ask about colors ---

Channel = Annotated[int, Field(ge=0, le=255)]
Palette = dict[str, tuple[Channel, Channel, Channel]]


def bare_answer(text: str) -> str:
    """Return `text` in lower case, without the white space and punctuation around it.

    Example:
        >>> bare_answer(" **Red.** ")
        'red'
    """
    match = re.search(r"[^\W_](?:.*[^\W_])?", text, re.DOTALL)  # one search takes linear time, two re.sub do not
    return match.group().casefold() if match else ""


def _answerable(colors: Palette) -> Palette:
    for name in colors:
        if not name or bare_answer(name) != name:
            raise ValueError(f"{name!r} cannot be an answer: use a lower-case word without punctuation around it")
    # Tasks depend on the order of colors, and Prefect's parameters lose it in PostgreSQL: so sort them here.
    standard = list(COLORS)
    order = sorted(colors, key=lambda name: (standard.index(name) if name in standard else len(standard), name))
    return {name: colors[name] for name in order}


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
    """Settings of noisy images that show one color."""

    colors: Annotated[Palette, AfterValidator(_answerable)] = Field(COLORS, min_length=2)
    """Red, green and blue of each color by its name, e.g. {red = [220, 40, 40]}; the names are the correct answers."""
    image_size: int = Field(56, ge=8, le=2048)
    """Width and height of an image in pixels."""
    noise: float = Field(16.0, ge=0, le=255)
    """Standard deviation of the noise that each pixel gets, in levels from 0 to 255."""
    tint_jitter: float = Field(12.0, ge=0, le=255)
    """Largest shift of an image's red, green and blue, drawn separately for each, in levels from 0 to 255."""
    brightness_jitter: float = Field(0.12, ge=0, lt=1)
    """Largest relative change of an image's brightness: 0.12 scales it by 0.88 to 1.12."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.colors)


def color_image(color: str, seed: int, settings: ColorImageSettings) -> EncodedImage:
    """Return a noisy PNG image of `color`. Equal arguments give the same image."""
    random = np.random.default_rng(seed)
    brightness = 1 + settings.brightness_jitter * random.uniform(-1, 1)
    tint = settings.tint_jitter * random.uniform(-1, 1, 3)
    noise = settings.noise * random.standard_normal((settings.image_size, settings.image_size, 3))
    pixels = brightness * np.array(settings.colors[color]) + tint + noise
    return encode_png(Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8)))


def painter(
    settings: ColorImageSettings, draw: Callable[..., EncodedImage] = color_image
) -> Callable[[str, int], EncodedImage]:
    """Return `draw` with these settings and a cache of 32 images, because a whole group shows the same image.

    Threads that need the same image at the same time draw it once.
    """
    cached, one_at_a_time = lru_cache(maxsize=32)(partial(draw, settings=settings)), Lock()

    def paint(color: str, seed: int) -> EncodedImage:
        with one_at_a_time:
            return cached(color, seed)

    return paint


def color_reward(action: str, color: str, settings: ColorImageSettings) -> dict[str, float]:
    """Return the reward parts of an answer.

    `correct` is 1 if the answer is the color's name and nothing else, `format` is 1 if it is any of the names.
    """
    answer = bare_answer(action)
    return {"correct": float(answer == color), "format": float(answer in settings.colors)}
