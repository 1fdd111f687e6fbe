"""Pages of MiniWoB++ as a table: a screenshot, a question, the box of the element that it asks for, and an answer."""

from __future__ import annotations

import sys
from io import BytesIO
from math import ceil, floor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from clicks import SIDE, TOP, browser, click
from PIL import Image, ImageColor

SEEDS = 3584
PERCENT = SIDE / 100
TAGS = ("button", "input_text")
EDGE = 0.01  # a browser clicks on whole pixels: those that an element covers in part, without its right and lower edge
COLORS = [
    "black",
    "blue",
    "cyan",
    "grey",
    "lime",
    "magenta",
    "olive",
    "orange",
    "pink",
    "purple",
    "red",
    "white",
    "yellow",
]


def row(task: str, seed: int) -> dict[str, Any]:
    """Return the row of a page, which the browser renders."""
    seen, _ = browser(task).reset(seed=seed)
    file = BytesIO()
    Image.fromarray(seen["screenshot"][TOP:, :SIDE]).save(file, "PNG")
    choices = [each for each in seen["dom_elements"] if each["classes"] == "color" or each["tag"] in TAGS]
    right = (each for each in choices if len(choices) == 1 or click(task, seed, pixels(*center(each))))
    if (element := next(right, None)) is None:
        raise ValueError(f"{task}, seed {seed}: no single click on a button or colored box is right")
    (left, top), (width, height) = place(element)
    box = [floor(left), floor(top), ceil(left + width) - EDGE, ceil(top + height) - EDGE]
    x, y = center(element)
    page = {"image": {"bytes": file.getvalue()}, "question": seen["utterance"], "box": box}
    return page | {"demonstration": f"{reading(choices, element)}({x:02.0f}, {y:02.0f})", "width": SIDE, "height": SIDE}


def reading(choices: list[Any], element: Any) -> str:
    """Return what a demonstration says before the point: the colors of all boxes, or the name of the button."""
    if len(choices) == 1:
        return ""
    colors = [color_name(each["bg_color"][:3]) for each in choices if each["classes"] == "color"]
    return f"{', '.join(colors) or element['text'].lower()}: "


def place(element: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the left upper corner and the size of an element, in pixels below the question."""
    left, top, width, height = (element[key].item() for key in ("left", "top", "width", "height"))
    return (left, top - TOP), (width, height)


def center(element: Any) -> tuple[float, float]:
    """Return the center of an element, in percent of the page."""
    x, y = ((low + size / 2) / PERCENT for low, size in zip(*place(element), strict=True))
    return x, y


def pixels(x: float, y: float) -> Any:
    """Return a point, which is in percent of the page, in pixels of the screen."""
    return np.array([x * PERCENT, TOP + y * PERCENT], np.float32)


def color_name(color: Any) -> str:
    """Return the name of a color, whose parts are from 0 to 1."""
    return min(COLORS, key=lambda name: float(abs(color * 255 - ImageColor.getrgb(name)).max()))


if __name__ == "__main__":
    for task in sys.argv[1:]:
        pages = {page["image"]["bytes"]: page for page in (row(task, seed) for seed in range(SEEDS))}  # none twice
        pq.write_table(pa.Table.from_pylist(list(pages.values())), f"{task}.parquet")
