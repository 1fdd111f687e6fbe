"""Convert camera images to patches for the vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.policies.molmoact2.processing.batch import Ints, Pixels

_CHANNELS = 3
_BILINEAR = 2  # Pillow's number for bilinear resampling, as in processor_config.json


@dataclass(frozen=True)
class ImageLayout:
    """Geometry of an image that is resized to a square, cut into square patches, and pooled into image tokens.

    side: pixels of the resized image. patch: pixels of a patch's side. pool: patches along the side of a window that
    becomes one image token. columns: True if each row of image tokens ends with a column token.

    Example:
        >>> layout = ImageLayout(side=84, patch=14, pool=2, columns=False)
        >>> layout.patches, layout.rows
        (6, 3)
        >>> layout.patchify([np.zeros((48, 64, 3), np.uint8)]).shape
        (1, 36, 588)
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
        """Read the layout from a checkpoint's processor_config.json; missing fields have the released defaults.

        Raises:
            ConfigurationError: the file asks for image processing that is not supported.
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
        for name, (value, supported) in values.items():
            if value != supported:
                raise ConfigurationError(
                    f"{name} is {value!r}, but only {supported!r} is supported",
                    code="image_processing_unsupported",
                    where="processor_config.json",
                )
        columns = document.get("use_single_crop_col_tokens")
        columns = document.get("image_use_col_tokens", True) if columns is None else columns
        return cls(size["height"], image.get("patch_size", 14), pool[0], bool(columns))

    def processor_config(self) -> dict[str, Any]:
        """Return the content of a processor_config.json from which `from_processor_config` reads this layout."""
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
        """Number of patches along a side of an image."""
        return self.side // self.patch

    @property
    def rows(self) -> int:
        """Number of rows of image tokens, which is also the number of image tokens in a row."""
        return -(-self.patches // self.pool)

    @cached_property
    def pooling(self) -> Ints:
        """Indices of the patches of each image token of one image, shape (rows * rows, pool * pool); -1 is no patch.

        If the patches do not fill whole windows, the grid is padded on both sides; an odd row or column goes last.
        """
        lacking = self.rows * self.pool - self.patches
        grid = np.arange(self.patches**2).reshape(self.patches, self.patches)
        grid = np.pad(grid, [(lacking // 2, lacking - lacking // 2)] * 2, constant_values=-1)
        windows = grid.reshape(self.rows, self.pool, self.rows, self.pool).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(windows.reshape(self.rows**2, self.pool**2))

    def patchify(self, images: Sequence[Pixels]) -> Pixels:
        """Return uint8 patches of shape (images, patches, pixels of a patch); channels are last within a patch."""
        n, p = self.patches, self.patch
        patches = torch.empty(len(images), n, n, p, p * _CHANNELS, dtype=torch.uint8)
        for one, image in zip(patches, images, strict=True):
            levels = _resize(image, self.side)
            one.copy_(levels.reshape(n, p, n, p * _CHANNELS).transpose(1, 2))
        return patches.reshape(len(images), n * n, p * p * _CHANNELS).numpy()


def _resize(image: Pixels, side: int) -> Tensor:
    """Resize an image to (side, side, 3) bilinearly, without antialiasing.

    Returns float32 levels from 0 to 255, rounded to integers.
    """
    levels = torch.from_numpy(image.astype(np.float32, order="C"))
    if image.shape[:2] == (side, side):
        return levels
    resized = interpolate(levels.permute(2, 0, 1)[None], (side, side), mode="bilinear", align_corners=False)
    return resized[0].round_().clamp_(0, 255).permute(1, 2, 0)
