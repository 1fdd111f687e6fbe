"""Random changes of training images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

from armature.components.vla.settings import ImageAugmentationSettings

Pixels = NDArray[np.uint8]


def augmented(pixels: Pixels, settings: ImageAugmentationSettings, random: np.random.Generator) -> Pixels:
    """`pixels`, uint8 RGB (height, width, 3), cropped, rotated, recolored and blurred at random; same size.

    Corners that a rotation leaves empty are black.
    """
    image = _moved(Image.fromarray(pixels), settings, random)
    brightness, contrast, saturation = (
        random.uniform(1 - spread, 1 + spread)
        for spread in (settings.brightness, settings.contrast, settings.saturation)
    )
    turn = random.uniform(-settings.hue, settings.hue)
    changes: list[Callable[[Image.Image], Image.Image]] = [
        lambda one: ImageEnhance.Brightness(one).enhance(brightness),
        lambda one: ImageEnhance.Contrast(one).enhance(contrast),
        lambda one: ImageEnhance.Color(one).enhance(saturation),
        lambda one: _hue_shifted(one, turn),
    ]
    for change in random.permutation(len(changes)):
        image = changes[change](image)
    blurred, radius = random.random() < settings.blur_probability, random.uniform(0.1, 2.0)
    if blurred:
        image = image.filter(ImageFilter.GaussianBlur(radius))
    return np.asarray(image)


def _moved(image: Image.Image, settings: ImageAugmentationSettings, random: np.random.Generator) -> Image.Image:
    """A crop from anywhere, resized to the whole, then rotated about the middle."""
    width, height = image.size
    kept_width, kept_height = round(width * settings.crop_side), round(height * settings.crop_side)
    left = int(random.integers(width - kept_width + 1))
    top = int(random.integers(height - kept_height + 1))
    degrees = random.uniform(-settings.rotation_degrees, settings.rotation_degrees)
    if (kept_width, kept_height) != (width, height):
        box = (left, top, left + kept_width, top + kept_height)
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
    return image.rotate(degrees, Image.Resampling.BILINEAR) if degrees else image


def _hue_shifted(image: Image.Image, turn: float) -> Image.Image:
    """Every hue moved by `turn` of the circle, in the 256 steps that 8 bits have."""
    steps = round(turn * 256)
    if not steps:
        return image
    hue, saturation, value = image.convert("HSV").split()
    moved = Image.fromarray(np.asarray(hue) + np.uint8(steps % 256))
    return Image.merge("HSV", (moved, saturation, value)).convert("RGB")
