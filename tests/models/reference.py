"""Attention in plain torch, as the independent reference of every kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Return softmax attention (T, H, D) in float64.

    Args:
        q: queries (T, H, D).
        k, v: keys and values (K, G, D); each of the G heads serves H / G query heads.
        allowed: (T, K) bool: True where a query attends to a key.
    """
    query, key, value = (tensor.double() for tensor in (q, k, v))
    key, value = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)
