"""The trainer's parameters as the servers expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Parameters = Mapping[str, torch.Tensor]
"""Checkpoint name -> tensor on this rank's GPU; sharded ones as DTensor, on all ranks in the same order."""


def describe(parameters: Parameters) -> dict[str, Any]:
    """Names, types and whole shapes, as vLLM's update routes want them."""
    return {
        "names": list(parameters),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in parameters.values()],
        "shapes": [list(tensor.shape) for tensor in parameters.values()],
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The unsharded tensor, contiguous; a collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()
