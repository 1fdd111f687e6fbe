"""The trainer's parameters as the servers expect them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Parameters = Mapping[str, torch.Tensor]
"""Checkpoint name -> tensor on this rank's GPU; sharded ones as DTensor, on all ranks in the same order."""

BUCKET = 2**30
"""Bytes that are sent at once; the tensor that goes beyond is among them."""


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


def aligned(parameters: Parameters) -> Parameters:
    """In an order in which each lies at a multiple of its element's size when all lie behind one another."""
    return dict(sorted(parameters.items(), key=lambda item: -item[1].element_size()))


def size(tensor: torch.Tensor) -> int:
    """Bytes of the unsharded tensor."""
    return tensor.numel() * tensor.element_size()


def buckets(parameters: Parameters, most: int = BUCKET) -> Iterator[Parameters]:
    """Those that are sent at once, in order: as many as `most` bytes hold and one more, as vLLM counts them."""
    bucket: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in parameters.items():
        bucket[name] = tensor
        held += size(tensor)
        if held > most:
            yield bucket
            bucket, held = {}, 0
    if bucket:
        yield bucket


def pack(bucket: Parameters, buffer: torch.Tensor) -> torch.Tensor:
    """The bytes of the whole tensors behind one another, in the first part of `buffer`, uint8. A collective for
    DTensors."""
    flat = [whole(tensor).view(-1).view(torch.uint8) for tensor in bucket.values()]
    return torch.cat(flat, out=buffer[: sum(map(len, flat))])


def largest(parameters: Parameters, most: int = BUCKET) -> int:
    """Bytes of the largest bucket."""
    return max(sum(map(size, bucket.values())) for bucket in buckets(parameters, most))
