"""What tasks look like: a grid of first observations."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from armature.components.artifacts.images import decode
from armature.components.contracts.episodes import Observation
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import EncodedImage

WIDTH, IMAGE, LINES, COLUMNS = 224, 192, 5, 4
HEIGHT = IMAGE + 12 * LINES + 12


def image_grid(observations: Sequence[tuple[str, Observation]]) -> Image.Image:
    """One cell per (title, observation): its first image, the title, and the beginning of its text."""
    rows = -(-len(observations) // COLUMNS)
    grid = Image.new("RGB", (WIDTH * COLUMNS, HEIGHT * rows), "white")
    for index, (title, observation) in enumerate(observations):
        grid.paste(_cell(title, observation), (WIDTH * (index % COLUMNS), HEIGHT * (index // COLUMNS)))
    return grid


def _cell(title: str, observation: Observation) -> Image.Image:
    cell = Image.new("RGB", (WIDTH, HEIGHT), "white")
    images = [part for part in observation.content if isinstance(part, EncodedImage)]
    text = " ".join(part for part in observation.content if isinstance(part, str))
    try:
        image = decode(images[0]) if images else None
    except DataError as error:  # its rollouts will fail alone, counted as bad_image
        image, text = None, f"bad image: {error.what}"
    if image is not None:
        scale = (IMAGE - 8) / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        cell.paste(image.resize(size, Image.Resampling.NEAREST), ((WIDTH - size[0]) // 2, 4))
    more = f" (+{len(images) - 1} images)" if len(images) > 1 else ""
    lines = [title + more, *textwrap.wrap(text, 36)][:LINES]
    caption = "\n".join(lines).encode("latin-1", "replace").decode("latin-1")  # what the built-in font has
    ImageDraw.Draw(cell).multiline_text((8, IMAGE), caption, "black", ImageFont.load_default_imagefont())
    return cell
