"""What the backward pass needs, in main memory until then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 16 * 1024
"""Bytes of the tensors that are worth a copy."""

Kept = Tensor | tuple[torch.device, Tensor]


@contextmanager
def offloaded_activations() -> Iterator[None]:
    """What autograd keeps of what is computed in here lies in main memory, pinned for a GPU, until it is used.

    The copies are the same bits. They are made in the stream of the computation, so nobody waits for them on the host
    and memory is free for what comes next. Weights stay: they are there anyway, and FSDP gathers them again.
    """
    with saved_tensors_hooks(to_main_memory, from_main_memory):
        yield


def to_main_memory(tensor: Tensor) -> Kept:
    """A copy on the CPU and where it came from; small tensors, and weights or views of them, as they are."""
    owner = tensor if tensor._base is None else tensor._base
    if isinstance(owner, nn.Parameter) or tensor.nbytes < SMALLEST:
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def from_main_memory(kept: Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, copy = kept
    return copy.to(device, non_blocking=True)
