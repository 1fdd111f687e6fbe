from __future__ import annotations

import colorsys

import numpy as np
import pytest

from armature.components.robots.imitation.data import augmented
from armature.components.robots.imitation.settings import ImageAugmentationSettings

from .settings import AUGMENTATION

NOTHING = dict.fromkeys(AUGMENTATION, 0.0) | {"crop_side": 1.0}


def image(height: int = 24, width: int = 36) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_same_seed_gives_same_image_and_size() -> None:
    settings = ImageAugmentationSettings(**AUGMENTATION)
    first, again, other = (augmented(image(), settings, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (24, 36, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, image())


def test_image_is_unchanged_without_augmentation() -> None:
    result = augmented(image(), ImageAugmentationSettings(**NOTHING), np.random.default_rng(0))
    assert np.array_equal(result, image())


def test_hue_shift_keeps_saturation_and_value() -> None:
    red = np.full((4, 4, 3), (200, 40, 40), np.uint8)
    settings = ImageAugmentationSettings(**NOTHING | {"hue": 0.5})
    random = np.random.default_rng(3)
    turn = np.random.default_rng(3)
    turn.integers(2), turn.integers(2)
    result = augmented(red, settings, random)[0, 0] / 255
    hue, saturation, value = colorsys.rgb_to_hsv(*result)
    original = colorsys.rgb_to_hsv(200 / 255, 40 / 255, 40 / 255)
    assert (saturation, value) == pytest.approx(original[1:], abs=0.02)
    assert hue != pytest.approx(original[0], abs=0.02)


def test_crop_spans_its_fraction_of_the_image() -> None:
    """An augmented horizontal ramp spans 80 % of the original values."""
    ramp = np.broadcast_to(np.linspace(0, 250, 200).astype(np.uint8)[None, :, None], (200, 200, 3)).copy()
    settings = ImageAugmentationSettings(**NOTHING | {"crop_side": 0.8})
    spans = []
    for seed in range(5):
        seen = augmented(ramp, settings, np.random.default_rng(seed))[100, :, 0].astype(float)
        spans.append(seen[-1] - seen[0])
    assert spans == pytest.approx([200.0] * 5, abs=4)


def test_brightness_factor_stays_in_its_bounds() -> None:
    gray = np.full((4, 4, 3), 100, np.uint8)
    settings = ImageAugmentationSettings(**NOTHING | {"brightness": 0.2})
    values = [int(augmented(gray, settings, np.random.default_rng(seed))[0, 0, 0]) for seed in range(40)]
    assert min(values) >= 79 and max(values) <= 121 and max(values) - min(values) > 20
