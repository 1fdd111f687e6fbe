"""Encoded images, on their way into the image store."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.images import EncodedImage
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes

TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


def seeds() -> list[tuple[bytes, str]]:
    """Return small images with their media types: one for each format and each mode that the format supports. Most have
    an orientation in EXIF."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 4), dtype=np.uint8)
    result = []
    for kind, media_type in TYPES.items():
        for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16", "CMYK"):
            image = Image.fromarray(pixels, "RGBA").convert("I" if mode == "I;16" else mode)
            exif = Image.Exif()
            exif[0x0112] = 1 + len(result) % 8
            buffer = io.BytesIO()
            try:
                image.save(buffer, kind, exif=exif)
            except (OSError, ValueError):  # not a mode of this format
                continue
            result.append((buffer.getvalue(), media_type))
    return result


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    store, existing = ImageStore(folder / "images"), seeds()

    def attempt(rng: random.Random) -> bool:
        data, media_type = rng.choice(existing)
        if rng.random() < 0.1:
            media_type = rng.choice([*TYPES.values(), "image/gif", "", "text/html"])
        reference = store.put(EncodedImage(damaged_bytes(data, rng), media_type))
        with Image.open(io.BytesIO(store.read(reference))) as stored:
            expect(stored.mode == "RGB" and "transparency" not in stored.info, f"stored as {stored.mode}")
            expect(stored.getexif().get(0x0112, 1) == 1, "stored with an orientation")
            expect(stored.size == (reference.width, reference.height), "another size than the reference says")
            expect(np.array_equal(stored, store.open(reference)), "the trainer sees other pixels")
        return True

    yield attempt
