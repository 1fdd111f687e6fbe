"""How one output of an image processor is joined across images.

Each function takes the list of that output per image, and the list of all outputs per image for rules that need
another one, and returns what the processor itself would return for the whole list.
Torch is imported when one of them is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Features: TypeAlias = "Mapping[str, Tensor]"
Join: TypeAlias = "Callable[[Sequence[Tensor], Sequence[Features]], Tensor]"


def cat(parts: Sequence[Tensor], features: Sequence[Features]) -> Tensor:
    """Along dim 0: patches, tiles, or rows of a grid."""
    import torch

    return torch.cat(list(parts))


def pad_cat(parts: Sequence[Tensor], features: Sequence[Features]) -> Tensor:
    """Along dim 0, after zeros were added at the end of every other dim up to the largest."""
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
    """Along dim 0, of indices into the rows of another output: `output`, its first `dims` dims taken flat.

    Indices of later images are raised by the rows before them. Negative ones mean "nothing" and are kept.
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
