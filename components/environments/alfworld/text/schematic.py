"""A small image of what the text has said: colored cells for the goal, the place, what is held and what is seen.

Nothing is drawn that the game has not said. A cell is the color pair of a kind of thing, so that a model with small
images can tell what is meant by looking alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from PIL import Image, ImageDraw
from pydantic import Field

from armature.components.artifacts.images import encode_png
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.settings import Settings
from armature.components.environments.alfworld import packaged

GRID = 4
COLORS = (
    (230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200), (245, 130, 48), (145, 30, 180), (70, 240, 240),
    (240, 50, 230), (210, 245, 60), (0, 128, 128), (170, 110, 40), (128, 0, 0), (0, 0, 128),
)  # fmt: skip
"""Far apart from each other. A kind is one of them in its cell's upper half and one in its lower half."""

_THING = re.compile(r"\b([a-z]+) \d+\b")
_PLACE = re.compile(r"^You (?:arrive at|open the|close the) ([a-z]+ \d+)")
_SEEN = re.compile(r"(?:you see) ([^.]*)\.")
_TAKEN = re.compile(r"^You pick up the ([a-z]+) \d+ from")
_PUT = re.compile(r"^You move the [a-z]+ \d+ to")


class NoImage(Settings):
    """Text alone."""

    form: Literal["none"] = Field(description="none: turns hold no image.")


class Schematic(Settings):
    """Four rows of four cells: the goal's things; the place and what is held; then eight things that are seen."""

    form: Literal["schematic"] = Field(description="schematic: colored cells for what the text has said.")
    image_size: int = Field(56, ge=16, le=1024, multiple_of=GRID, description="Width and height in pixels.")


@dataclass
class KnownState:
    """What the game's texts have said about the present, read turn by turn."""

    goal: tuple[str, ...]
    place: str | None = None
    held: str | None = None
    around: tuple[str, ...] = ()

    @classmethod
    def begin(cls, task: str) -> KnownState:
        return cls(tuple(word for word in re.findall(r"[a-z]+", task.lower()) if word in kinds())[:GRID])

    def read(self, feedback: str) -> None:
        """Take in one observation."""
        if place := _PLACE.search(feedback):
            self.place = place[1].split()[0]
            self.around = ()
        if seen := _SEEN.search(feedback):
            self.around = tuple(_THING.findall(seen[1]))
        if taken := _TAKEN.search(feedback):
            self.held = taken[1]
            if taken[1] in self.around:
                index = self.around.index(taken[1])
                self.around = self.around[:index] + self.around[index + 1 :]
        elif _PUT.search(feedback) and self.held:
            self.around, self.held = (*self.around, self.held), None

    def cells(self) -> tuple[str | None, ...]:
        """The kind in each cell, row by row; None where a cell is empty."""
        rows: list[tuple[str | None, ...]] = [self.goal, (self.place, self.held), *_rows(self.around)]
        return tuple(kind for row in rows for kind in (*row, *[None] * (GRID - len(row))))


def _rows(things: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [things[:GRID], things[GRID : 2 * GRID]]


@lru_cache(1)
def kinds() -> dict[str, int]:
    """Every kind of thing that alfworld knows, by its word, with a number."""
    constants = packaged.constants()
    words = sorted({name.lower() for name in constants.OBJECTS_SET | constants.RECEPTACLES})
    return {word: number for number, word in enumerate(words)}


@lru_cache(512)
def draw(cells: tuple[str | None, ...], size: int) -> EncodedImage:
    """The image of `cells`, the same for the same arguments; an empty cell is black."""
    image, side = Image.new("RGB", (size, size)), size // GRID
    pen = ImageDraw.Draw(image)
    for index, kind in enumerate(cells):
        if kind is None:
            continue
        number = kinds().get(kind, len(kinds()))
        x, y = side * (index % GRID), side * (index // GRID)
        upper, lower = COLORS[number % len(COLORS)], COLORS[number // len(COLORS) % len(COLORS)]
        pen.rectangle((x, y, x + side - 2, y + side // 2 - 1), upper)
        pen.rectangle((x, y + side // 2, x + side - 2, y + side - 2), lower)
    return encode_png(image)
