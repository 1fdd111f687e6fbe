"""Noisy pictures of one colour, for environments that ask about colours."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from threading import Lock
from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import AfterValidator, Field

from components.artifacts.images import encode_png
from components.contracts.images import EncodedImage
from components.contracts.settings import Settings

Channel = Annotated[int, Field(ge=0, le=255)]
Colours = dict[str, tuple[Channel, Channel, Channel]]


def bare_answer(text: str) -> str:
    """`text` in lower case, without the white space and punctuation around it."""
    return re.sub(r"^[\W_]+|[\W_]+$", "", text).casefold()


def _answerable(colours: Colours) -> Colours:
    for name in colours:
        if not name or bare_answer(name) != name:
            raise ValueError(f"{name!r} cannot be an answer: use a lower-case word without punctuation around it")
    return colours


COLORS: Colours = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 50),
    "orange": (240, 130, 30),
    "purple": (130, 40, 160),
    "white": (235, 235, 235),
    "black": (20, 20, 20),
}


class PictureSettings(Settings):
    """How pictures of a colour look."""

    colours: Annotated[Colours, AfterValidator(_answerable)] = Field(
        COLORS, min_length=2, description="The colours by name, e.g. {red = [220, 40, 40]}; names are the answers."
    )
    image_size: int = Field(56, ge=8, le=2048, description="Width and height of a picture in pixels.")
    noise: float = Field(16.0, ge=0, le=255, description="Standard deviation of each pixel's noise, of 255 levels.")
    tint_jitter: float = Field(
        12.0, ge=0, le=255, description="Largest shift of a whole picture's red, green and blue, each, of 255 levels."
    )
    brightness_jitter: float = Field(
        0.12, ge=0, lt=1, description="Largest change of a whole picture's brightness, as a part of it."
    )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.colours)


def colour_picture(colour: str, seed: int, settings: PictureSettings) -> EncodedImage:
    """A PNG of `colour`, the same for the same arguments."""
    random = np.random.default_rng(seed)
    brightness = 1 + settings.brightness_jitter * random.uniform(-1, 1)
    tint = settings.tint_jitter * random.uniform(-1, 1, 3)
    noise = settings.noise * random.standard_normal((settings.image_size, settings.image_size, 3))
    pixels = brightness * np.array(settings.colours[colour]) + tint + noise
    return encode_png(Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8)))


def painter(settings: PictureSettings) -> Callable[[str, int], EncodedImage]:
    """`colour_picture` with these settings; the last pictures are kept, as a whole group asks for the same one.

    Threads that ask at the same time have it drawn once.
    """
    draw, one_at_a_time = lru_cache(maxsize=32)(partial(colour_picture, settings=settings)), Lock()

    def paint(colour: str, seed: int) -> EncodedImage:
        with one_at_a_time:
            return draw(colour, seed)

    return paint


def colour_reward(action: str, colour: str, settings: PictureSettings) -> dict[str, float]:
    """`correct`: the answer is the colour's name and nothing else; `format`: it is one of the names."""
    answer = bare_answer(action)
    return {"correct": float(answer == colour), "format": float(answer in settings.colours)}
