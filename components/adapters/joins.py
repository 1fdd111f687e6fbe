"""How one output of an image processor is joined across images.

Each function takes the list of that output per image, and the list of all outputs per image for rules that need
another one, and returns what the processor itself would return for the whole list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

Features = Mapping[str, Tensor]
Join = Callable[[Sequence[Tensor], Sequence[Features]], Tensor]


def cat(parts: Sequence[Tensor], features: Sequence[Features]) -> Tensor:
    """Along dim 0: patches, tiles, or rows of a grid."""
    return torch.cat(list(parts))


def pad_cat(parts: Sequence[Tensor], features: Sequence[Features]) -> Tensor:
    """Along dim 0, after zeros were added at the end of every other dim up to the largest."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [most - size for most, size in zip(largest, part.shape[1:], strict=True)]
        padded.append(pad(part, [side for extra in reversed(missing) for side in (0, extra)]))
    return torch.cat(padded)


@dataclass(frozen=True)
class OffsetCat:
    """Along dim 0, of indices into the rows of another output: `output`, its first `dims` dims taken flat.

    Indices of later images are raised by the rows before them. Negative ones mean "nothing" and are kept.
    """

    output: str
    dims: int

    def __call__(self, parts: Sequence[Tensor], features: Sequence[Features]) -> Tensor:
        shifted, offset = [], 0
        for part, feature in zip(parts, features, strict=True):
            shifted.append(torch.where(part >= 0, part + offset, part))
            offset += feature[self.output].shape[: self.dims].numel()
        return torch.cat(shifted)
