"""Attention of vision towers whose images or windows lie behind one another, one call for all of them.

On a GPU in 16 bits it is PyTorch's FlashAttention for sequences of several lengths; elsewhere, windows of equal lengths
are computed together by `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections import defaultdict
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from armature.components.models.remote import is_remote

WINDOWS = "flash_windows"
"""Its name in transformers, which passes lengths to names with "flash" in them, and else calls attention once for each
image or window."""


def choose_kernels(model: PreTrainedModel) -> None:
    """Let the vision tower of a model that was loaded with `sdpa` use this module; code of a checkpoint keeps that."""
    if is_remote(model):
        return
    vision = getattr(model.config, "vision_config", None)
    if vision is not None and _takes_lengths(model):
        vision._attn_implementation = WINDOWS


def attend_in_windows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention in both directions within each image or window: (1, H, T, D) to (1, T, H, D)."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in under_autocast(query, key, value))
    if has_kernel(q):
        out = _flash(q, k, v, cu_seq_lens_q, max_length_q, scaling)
    else:
        out = _by_length(q, k, v, cu_seq_lens_q, scaling)
    return out[None], None


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """To the dtype of autocast, which knows `scaled_dot_product_attention` but not these kernels."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
    return tensors


def in_one_graph(tower: nn.Module) -> bool:
    """Whether attention of this vision tower becomes part of a compiled layer: nobody has to read lengths for it."""
    if not _takes_lengths(tower):
        return True
    weight = next(tower.parameters())
    fits = has_kernel(torch.empty(0, 8, dtype=weight.dtype, device=weight.device))
    return fits and getattr(tower.config, "_attn_implementation", None) == WINDOWS


def _takes_lengths(model: nn.Module) -> bool:
    kinds = {type(module) for module in model.modules()}
    return any("cu_seqlens" in signature(kind.forward).parameters for kind in kinds)


def has_kernel(q: Tensor) -> bool:
    if not q.is_cuda:
        return False
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    """What `torch.nn.attention.varlen` calls, without its operators in Python: their host time exceeds the GPU time of
    a short layer.
    """
    ends, tensors = ends.int(), (q.contiguous(), k.contiguous(), v.contiguous())
    out: Tensor
    out, *_ = torch.ops.aten._flash_attention_forward(
        *tensors, ends, ends, longest, longest, 0.0, is_causal=False, return_debug_mask=False, scale=scale
    )
    return out


@torch.compiler.disable
def _by_length(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
    """As `_flash`; windows of one length are one batch."""
    lengths: list[int] = ends.diff().tolist()
    begins: dict[int, list[int]] = defaultdict(list)
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        begins[length].append(end - length)
    outs, places = [], []
    for length, first in begins.items():
        at = (torch.tensor(first)[:, None] + torch.arange(length)).to(q.device)
        query, key, value = (tensor[at].transpose(1, 2) for tensor in (q, k, v))
        out = scaled_dot_product_attention(query, key, value, scale=scale)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        places.append(at.flatten())
    return torch.cat(outs)[torch.cat(places).argsort()]


AttentionInterface.register(WINDOWS, attend_in_windows)
