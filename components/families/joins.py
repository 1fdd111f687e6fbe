"""Functions that join an image processor's output across images.

Each function takes one output per image (`parts`), and all outputs per image (`features`), which some functions need as
well. It returns what the processor itself would return for all images together. Torch is imported when a function is
called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Features: TypeAlias = "Mapping[str, Tensor]"
"""All outputs of an image processor for one image, by name."""
Join: TypeAlias = "Callable[[Sequence[Tensor], Sequence[Features]], Tensor]"
"""Function that joins one output of an image processor across images. It gets the output for each image, and all
outputs of each image."""


def cat(parts: Sequence[Tensor], features: Sequence[Features]) -> Tensor:
    """Concatenate along dim 0: patches, tiles, or rows of a grid."""
    import torch

    return torch.cat(list(parts))


def pad_cat(parts: Sequence[Tensor], features: Sequence[Features]) -> Tensor:
    """Concatenate along dim 0 after padding all other dims with zeros at their ends to the largest size."""
    import torch
    from torch.nn.functional import pad

    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [most - size for most, size in zip(largest, part.shape[1:], strict=True)]
        padded.append(pad(part, [side for extra in reversed(missing) for side in (0, extra)]))
    return torch.cat(padded)


@dataclass(frozen=True)
class OffsetCat:
    """Concatenate indices into the rows of another output along dim 0.

    The indices of each image are raised by the number of rows of earlier images. The rows are the first `dims` dims of
    `output`, flattened. Negative indices mean "nothing" and are not changed.

    Example:
        >>> import torch
        >>> features = [{"pixel_values": torch.zeros(3, 2)}, {"pixel_values": torch.zeros(2, 2)}]
        >>> join = OffsetCat("pixel_values", dims=1)
        >>> join([torch.tensor([0, -1]), torch.tensor([0, 1])], features).tolist()
        [0, -1, 3, 4]
    """

    output: str
    dims: int

    def __call__(self, parts: Sequence[Tensor], features: Sequence[Features]) -> Tensor:
        import torch

        shifted, offset = [], 0
        for part, feature in zip(parts, features, strict=True):
            shifted.append(torch.where(part >= 0, part + offset, part))
            offset += feature[self.output].shape[: self.dims].numel()
        return torch.cat(shifted)
