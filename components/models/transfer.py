"""Tensors on their way to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """As `tensor.to(device)`, without waiting for what a GPU has been given to do before.

    Only copies from pinned memory are asynchronous.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")
