"""FlashAttention 4 and other packages for GPUs: whether they are installed, and what they need."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from armature.components.artifacts.sources import versions

# Which packages for GPUs are installed.

TRITON = find_spec("triton") is not None
"""Whether the kernels of this project can be compiled."""


@cache
def is_installed(distribution: str) -> bool:
    """Tells flash-attn from flash-attn-4, which both have modules below `flash_attn`."""
    return bool(versions(distribution)[distribution])


# FlashAttention 4, of the package flash-attn-4.
#
# On a Hopper GPU it takes 0.6 to 0.7 of the time of PyTorch's kernels for packed rows.
#
# Its kernels are compiled when they are first called, which takes some seconds.

VERIFIED = {(64, 1), (128, 4), (128, 6), (128, 7), (128, 8)}
"""Head sizes and query heads per key head, in bf16, whose results were compared on a GPU with softmax written out."""


def has_kernel(q: Tensor, k: Tensor) -> bool:
    """Whether to use it for queries (T, H, D) and keys (K, G, D), which PyTorch has a kernel for, too."""
    known = (q.shape[-1], q.shape[1] // k.shape[1]) in VERIFIED and q.dtype == torch.bfloat16
    return known and torch.cuda.get_device_capability(q.device)[0] == 9 and is_installed("flash-attn-4")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention of each sequence's queries, which are its last tokens: (T, H, D).

    Args:
        k, v: (K, G, D), of groups of heads.
        ends: (S + 1,) int32 each: where queries and keys of the S sequences end.
        longest: the most queries and keys of a sequence.
        window: a token attends to so many, itself included; None: to all before it.
    """
    from flash_attn.cute import flash_attn_varlen_func

    found: Any = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=ends[0],
        cu_seqlens_k=ends[1],
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        softmax_scale=scale,
        causal=window is None,
        window_size=(None, None) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    out: Tensor = found[0]
    return out
