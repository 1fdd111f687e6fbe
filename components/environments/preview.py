"""What tasks look like: a grid of first observations."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from components.artifacts.images import decode
from components.contracts.episodes import Observation
from components.contracts.errors import DataError
from components.contracts.images import EncodedImage

WIDTH, PICTURE, LINES, COLUMNS = 224, 192, 5, 4
HEIGHT = PICTURE + 12 * LINES + 12


def picture_grid(observations: Sequence[tuple[str, Observation]]) -> Image.Image:
    """One cell per (title, observation): its first picture, the title, and the beginning of its text."""
    rows = -(-len(observations) // COLUMNS)
    grid = Image.new("RGB", (WIDTH * COLUMNS, HEIGHT * rows), "white")
    for index, (title, observation) in enumerate(observations):
        grid.paste(_cell(title, observation), (WIDTH * (index % COLUMNS), HEIGHT * (index // COLUMNS)))
    return grid


def _cell(title: str, observation: Observation) -> Image.Image:
    cell = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pictures = [part for part in observation.content if isinstance(part, EncodedImage)]
    text = " ".join(part for part in observation.content if isinstance(part, str))
    try:
        picture = decode(pictures[0]) if pictures else None
    except DataError as error:  # its rollouts will fail alone, counted as bad_image
        picture, text = None, f"bad image: {error.what}"
    if picture is not None:
        scale = (PICTURE - 8) / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        cell.paste(picture.resize(size, Image.Resampling.NEAREST), ((WIDTH - size[0]) // 2, 4))
    more = f" (+{len(pictures) - 1} pictures)" if len(pictures) > 1 else ""
    lines = [title + more, *textwrap.wrap(text, 36)][:LINES]
    caption = "\n".join(lines).encode("latin-1", "replace").decode("latin-1")  # what the built-in font has
    ImageDraw.Draw(cell).multiline_text((8, PICTURE), caption, "black", ImageFont.load_default_imagefont())
    return cell
