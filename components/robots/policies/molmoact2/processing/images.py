"""Camera images as patches for the vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.robots.policies.molmoact2.processing.batch import Ints, Pixels

_CHANNELS, _BILINEAR = 3, 2  # Pillow's number


@dataclass(frozen=True)
class ImageLayout:
    """One crop per image, `side` pixels square, of square patches that are pooled in square windows.

    columns: Whether each row of image tokens ends with a column token.
    """

    side: int
    patch: int
    pool: int
    columns: bool

    def __post_init__(self) -> None:
        if self.side % self.patch:
            raise ConfigurationError(
                f"a side of {self.side} pixels is not a multiple of the patch of {self.patch}",
                code="invalid_image_side",
            )

    @classmethod
    def from_processor_config(cls, document: Mapping[str, Any]) -> ImageLayout:
        """Of a checkpoint's processor_config.json; what it leaves out is as in the released classes.

        Raises:
            ConfigurationError: the images are prepared in another way.
        """
        image = document["image_processor"]
        size, pool = image.get("size", {"height": 378, "width": 378}), image.get("pooling_size", [2, 2])
        values = {
            "crop_mode": (image.get("crop_mode"), "resize"),
            "size": (size["height"], size["width"]),
            "pooling_size": (pool[0], pool[1]),
            "resample": (image.get("resample", _BILINEAR), _BILINEAR),
            "image_mean": (image.get("image_mean", [0.5] * 3), [0.5] * 3),
            "image_std": (image.get("image_std", [0.5] * 3), [0.5] * 3),
        }
        for name, (given, wanted) in values.items():
            if given != wanted:
                raise ConfigurationError(
                    f"{name} is {given!r}, and only {wanted!r} is supported",
                    code="image_processing_unsupported",
                    where="processor_config.json",
                )
        columns = document.get("use_single_crop_col_tokens")
        columns = document.get("image_use_col_tokens", True) if columns is None else columns
        return cls(size["height"], image.get("patch_size", 14), pool[0], bool(columns))

    def processor_config(self) -> dict[str, Any]:
        """What `from_processor_config` reads."""
        return {
            "image_processor": {
                "crop_mode": "resize",
                "size": {"height": self.side, "width": self.side},
                "patch_size": self.patch,
                "pooling_size": [self.pool, self.pool],
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
                "do_convert_rgb": True,
                "resample": _BILINEAR,
                "image_processor_type": "MolmoAct2ImageProcessor",
            },
            "image_use_col_tokens": self.columns,
            "use_single_crop_col_tokens": self.columns,
            "use_single_crop_start_token": True,
            "processor_class": "MolmoAct2Processor",
        }

    @property
    def patches(self) -> int:
        """Of an image, along a side."""
        return self.side // self.patch

    @property
    def rows(self) -> int:
        """Of image tokens; as many as there are in a row."""
        return -(-self.patches // self.pool)

    @cached_property
    def pooling(self) -> Ints:
        """(rows * rows, pool * pool): the patches of each image token of one image, -1 where there is none.

        What the patches lack to whole windows is added half before and half after, the odd one after.
        """
        lacking = self.rows * self.pool - self.patches
        grid = np.arange(self.patches**2).reshape(self.patches, self.patches)
        grid = np.pad(grid, [(lacking // 2, lacking - lacking // 2)] * 2, constant_values=-1)
        windows = grid.reshape(self.rows, self.pool, self.rows, self.pool).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(windows.reshape(self.rows**2, self.pool**2))

    def patchify(self, images: Sequence[Pixels]) -> Pixels:
        """(images, patches, pixels of a patch) uint8 levels, the channel last within a patch.

        Raises:
            DataError: an image is not uint8 of (height, width, 3).
        """
        n, p = self.patches, self.patch
        patches = torch.empty(len(images), n, n, p, p * _CHANNELS, dtype=torch.uint8)
        for one, image in zip(patches, images, strict=True):
            levels = _resize(_checked(image), self.side)
            one.copy_(levels.reshape(n, p, n, p * _CHANNELS).transpose(1, 2))
        return patches.reshape(len(images), n * n, p * p * _CHANNELS).numpy()


def _resize(image: Pixels, side: int) -> Tensor:
    """(side, side, 3) whole numbers as float32: bilinear between pixel centers without antialiasing, then rounded."""
    levels = torch.from_numpy(image.astype(np.float32, order="C"))
    if image.shape[:2] == (side, side):
        return levels
    resized = interpolate(levels.permute(2, 0, 1)[None], (side, side), mode="bilinear", align_corners=False)
    return resized[0].round_().clamp_(0, 255).permute(1, 2, 0)


def _checked(image: Pixels) -> Pixels:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != _CHANNELS or not image.size:
        raise DataError(
            f"an image is {image.dtype} of shape {image.shape}, not uint8 of (height, width, 3)",
            code="invalid_image_array",
            remedy="convert it to RGB",
        )
    return image
