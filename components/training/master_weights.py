"""An fp32 weight in two halves: the bf16 value that the model computes with, and the 16 bits that it lacks."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 0x8000


def joined(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 weights of which `weight` (bf16) and `low` (int16) are the halves. Same shapes."""
    return ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 value nearest to each of `master` (fp32), and what `joined` needs to give `master` back bit for bit.

    Of two that are equally near it is the larger in magnitude: then `low` fits into 16 bits.
    """
    bits = master.view(torch.int32)
    high = (bits + _HALF) >> 16
    return high.short().view(torch.bfloat16), (bits - (high << 16)).short()
