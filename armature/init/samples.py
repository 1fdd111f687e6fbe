"""Draw a small dataset: images of a colored shape with a question about its color."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 50),
    "purple": (130, 40, 160),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
EACH = 18
"""Number of images of each combination of color and shape."""
TESTED = 5
"""Number of images of each combination that are in the test split."""
SIZE, BACKGROUND = 56, (200, 200, 200)
"""Width and height of an image in pixels, and the RGB color of its background."""


def write_samples(folder: Path) -> None:
    """Write the table `shapes.jsonl` and its images in `images/`. The files are the same on every machine.

    Each row has the columns image (path relative to the table), question, answer, shape and split (train or test).
    """
    (folder / "images").mkdir(parents=True)
    random, rows = Random(0), []
    for number, (index, color, shape) in enumerate(product(range(EACH), COLORS, SHAPES)):
        name = f"images/{number:03d}.png"
        _image(color, shape, random).save(folder / name)
        split = "test" if index < TESTED else "train"
        question = f"What color is the {shape}?"
        rows.append({"image": name, "question": question, "answer": color, "shape": shape, "split": split})
    (folder / "shapes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _image(color: str, shape: str, random: Random) -> Image.Image:
    """Draw a shape with random size, position and a slightly random shade of the color."""
    image = Image.new("RGB", (SIZE, SIZE), BACKGROUND)
    width = random.randint(38, 50)
    left, top = random.randint(2, SIZE - width - 2), random.randint(2, SIZE - width - 2)
    right, bottom = left + width, top + width
    red, green, blue = (min(255, max(0, level + random.randint(-15, 15))) for level in COLORS[color])
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=(red, green, blue))
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=(red, green, blue))
    else:
        corners = [(left, bottom), (right, bottom), ((left + right) // 2, top)]
        draw.polygon(corners, fill=(red, green, blue))
    return image
