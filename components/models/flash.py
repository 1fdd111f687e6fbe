"""FlashAttention 4 (package flash-attn-4) for packed rows, and checks for installed GPU packages.

On a Hopper GPU it takes 0.6 to 0.7 of the time of PyTorch's kernels. Its kernels are compiled at their first call,
which takes some seconds.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from armature.components.artifacts.sources import versions

TRITON = find_spec("triton") is not None
"""True if Triton is installed, which compiles this project's kernels."""


@cache
def is_installed(distribution: str) -> bool:
    """Check that a distribution is installed. Importing a module would not tell, since flash-attn and flash-attn-4 both
    have modules below `flash_attn`."""
    return bool(versions(distribution)[distribution])


VERIFIED = {(64, 1), (128, 4), (128, 6), (128, 7), (128, 8)}
"""Pairs (head size, query heads per key head) for which the kernel's bf16 results were compared on a GPU with softmax
attention in plain torch."""


def has_kernel(q: Tensor, k: Tensor) -> bool:
    """Check that FlashAttention 4 should be used for queries (T, H, D) and keys (K, G, D). PyTorch must have a kernel
    for them, too."""
    verified = (q.shape[-1], q.shape[1] // k.shape[1]) in VERIFIED and q.dtype == torch.bfloat16
    return verified and torch.cuda.get_device_capability(q.device)[0] == 9 and is_installed("flash-attn-4")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention of S packed sequences, returned as (T, H, D). The queries of a sequence are its last tokens.

    Args:
        q: queries (T, H, D).
        k, v: keys and values (K, G, D), where each of the G heads serves H / G query heads.
        ends: cumulative numbers of queries and of keys, (S + 1,) int32 each.
        longest: largest number of queries and of keys of a sequence.
        scale: factor of the scores; None for 1 / sqrt(D).
        window: number of tokens that a token attends to, itself included; None for all earlier ones.
    """
    from flash_attn.cute import flash_attn_varlen_func

    outputs: Any = flash_attn_varlen_func(
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
    out: Tensor = outputs[0]
    return out
