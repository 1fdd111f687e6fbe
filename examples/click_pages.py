"""Pages of MiniWoB++ as a table: a screenshot, a question, the box of the element that it asks for, and an answer."""

from __future__ import annotations

import sys
from io import BytesIO
from math import ceil, floor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from clicks import SIDE, TOP, browser
from miniwob.action import ActionTypes
from PIL import Image, ImageColor

PAGES = 3584
PERCENT = SIDE / 100
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
    element, reading = expert(seen)
    left, top, width, height = (element[key].item() for key in ("left", "top", "width", "height"))
    top -= TOP
    box = [floor(left), floor(top), ceil(left + width) - EDGE, ceil(top + height) - EDGE]
    point = ", ".join(f"{(low + size / 2) / PERCENT:02.0f}" for low, size in ((left, width), (top, height)))
    file = BytesIO()
    Image.fromarray(seen["screenshot"][TOP:, :SIDE]).save(file, "PNG")
    page = {"image": {"bytes": file.getvalue()}, "question": seen["utterance"], "box": box}
    return page | {"demonstration": f"{reading}({point})", "width": SIDE, "height": SIDE}


def expert(seen: Any) -> tuple[Any, str]:
    """Return the element that the question asks for, and what a demonstration reads before: the colors of all boxes."""
    boxes = [each for each in seen["dom_elements"] if each["classes"] == "color"]
    if not boxes:
        return next(each for each in seen["dom_elements"] if each["tag"] in ("button", "input_text")), ""
    names = [color_name(each["bg_color"][:3]) for each in boxes]
    return boxes[names.index(dict(seen["fields"])["target"])], f"{', '.join(names)}: "


def color_name(color: Any) -> str:
    """Return the name of a color, whose parts are from 0 to 1."""
    return min(COLORS, key=lambda name: float(abs(color * 255 - ImageColor.getrgb(name)).max()))


def click(task: str, x: float, y: float) -> bool:
    """Click on the page that the browser shows, at percents of its width and height. Return the page's verdict."""
    point = np.array([x * PERCENT, TOP + y * PERCENT], np.float32)
    shown = browser(task)
    _, reward, *_ = shown.step(shown.unwrapped.create_action(ActionTypes.CLICK_COORDS, coords=point))
    return bool(reward > 0)


if __name__ == "__main__":
    for task in sys.argv[1:]:
        pages = [row(task, seed) for seed in range(PAGES)]
        pq.write_table(pa.Table.from_pylist(pages), f"{task}.parquet")
