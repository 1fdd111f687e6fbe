"""Images as patches, compared with a plain formula and torchvision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, Resize

from armature.components.robots.policies.molmoact2.modeling.vlm import normalized
from armature.components.robots.policies.molmoact2.processing.images import ImageLayout
from tests.refusals import refused

RELEASED = ImageLayout(side=378, patch=14, pool=2, columns=False)


def image(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (256, 256), (360, 480), (378, 378), (5, 700)])
def test_resizing_is_bitwise_equal_to_torchvision(size: tuple[int, int]) -> None:
    pixels = image(*size, seed=1)
    theirs = Resize([378, 378], InterpolationMode.BILINEAR, antialias=False)(torch.from_numpy(pixels).permute(2, 0, 1))
    wanted = theirs.permute(1, 2, 0).numpy().astype(np.float32) / np.float32(255) * np.float32(2) - np.float32(1)
    patches = wanted.reshape(27, 14, 27, 14, 3).transpose(0, 2, 1, 3, 4).reshape(729, 588)
    ours = RELEASED.patchify([pixels])
    assert ours.dtype == np.uint8 and np.array_equal(normalized(torch.from_numpy(ours[0])).numpy(), patches)


@pytest.mark.filterwarnings("error")
def test_images_of_different_sizes_become_one_array() -> None:
    together = RELEASED.patchify([image(256, 256), image(10, 20)])
    assert together.shape == (2, 729, 588)
    locked = np.asfortranarray(image(10, 20))
    locked.flags.writeable = False
    assert np.array_equal(together[1:], RELEASED.patchify([locked]))
    assert RELEASED.patchify([]).shape == (0, 729, 588)


def test_patches_are_pooled_two_by_two_with_padding_at_the_end() -> None:
    pooling = RELEASED.pooling
    assert pooling.shape == (196, 4)
    assert pooling[0].tolist() == [0, 1, 27, 28]
    assert pooling[13].tolist() == [26, -1, 53, -1]
    assert pooling[14].tolist() == [54, 55, 81, 82]
    assert pooling[195].tolist() == [728, -1, -1, -1]
    assert sorted(pooling[pooling >= 0].tolist()) == list(range(729))


@pytest.mark.parametrize("side", [14, 28, 42])
def test_small_images_are_pooled(side: int) -> None:
    layout = ImageLayout(side, patch=14, pool=2, columns=False)
    assert len(layout.pooling) == math.ceil(side / 28) ** 2
    assert layout.patchify([image(9, 9)]).shape == (1, (side // 14) ** 2, 588)


def test_layout_round_trips() -> None:
    layout = ImageLayout(side=28, patch=14, pool=2, columns=True)
    assert ImageLayout.from_processor_config(layout.processor_config()) == layout
    released = RELEASED.processor_config() | {"image_use_col_tokens": True, "use_single_crop_col_tokens": False}
    assert ImageLayout.from_processor_config(released) == RELEASED
    short = {"image_processor": {"crop_mode": "resize"}, "use_single_crop_col_tokens": False}
    assert ImageLayout.from_processor_config(short) == RELEASED


@pytest.mark.parametrize(
    ("name", "value"), [("crop_mode", "overlap-and-resize-c2"), ("resample", 3), ("image_mean", [0.4, 0.5, 0.5])]
)
def test_rejects_unsupported_image_processing(name: str, value: object) -> None:
    document = RELEASED.processor_config()
    document["image_processor"][name] = value
    with refused("image_processing_unsupported", name, repr(value)):
        ImageLayout.from_processor_config(document)


def test_rejects_side_that_is_not_a_multiple_of_the_patch() -> None:
    with refused("invalid_image_side", 30, 14):
        ImageLayout(side=30, patch=14, pool=2, columns=False)
