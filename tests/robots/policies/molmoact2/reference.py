"""Reference implementation of the policy's formulas in float64 with loops, independent of the code under test.

Weights have the names of the released checkpoint's action expert; keys and values have the layout of a layer's cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def rms(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def turned(x: Tensor, base: float) -> Tensor:
    """Rotate x (T, size), whose rows have the positions 0, 1, ..., T - 1. One pair of dimensions is rotated at a
    time."""
    steps, size = x.shape
    half = size // 2
    y = x.clone()
    for i in range(half):
        angle = torch.arange(steps, dtype=x.dtype) * base ** (-i / half)
        y[:, i] = x[:, i] * angle.cos() - x[:, i + half] * angle.sin()
        y[:, i + half] = x[:, i + half] * angle.cos() + x[:, i] * angle.sin()
    return y


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Compute the attention of one head. `visible` is True for the keys that a query may attend to."""
    scores = queries @ keys.T / math.sqrt(queries.shape[-1])
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, -1) @ values


def velocity(
    weights: Weights,
    actions: Tensor,
    time: Tensor,
    cache: Sequence[tuple[Tensor, Tensor]],
    visible: Tensor,
    valid: Tensor,
    heads: int,
) -> Tensor:
    """Return the velocity that the action expert predicts for one chunk.

    Shapes: actions (T, D), time (), each layer's keys and values (kv heads, S, size), visible (S,), valid (T,).
    """
    steps = weights["time_embed.1.weight"].shape[1] // 2
    frequencies = torch.tensor([math.exp(-i * math.log(1e4) / (steps - 1)) for i in range(steps)], dtype=actions.dtype)
    features = torch.cat([torch.sin(time * frequencies), torch.cos(time * frequencies)])
    condition = linear(weights, "time_embed.3", silu(linear(weights, "time_embed.1", features)))
    keep = valid[:, None].to(actions.dtype)
    x = linear(weights, "action_embed", actions) * keep
    size = x.shape[1] // heads
    parts = [slice(head * size, (head + 1) * size) for head in range(heads)]
    for layer, (raw_keys, raw_values) in enumerate(cache):
        block = f"blocks.{layer}"
        keys = rms(torch.cat(list(raw_keys), -1) @ weights["context_k_proj.weight"].T)
        values = rms(torch.cat(list(raw_values), -1) @ weights["context_v_proj.weight"].T)
        s1, c1, g1, s2, c2, g2, s3, c3, g3 = linear(weights, f"{block}.modulation.linear", silu(condition)).chunk(9)
        q, k, v = linear(weights, f"{block}.self_attn.qkv", rms(x) * (1 + c1) + s1).chunk(3, -1)
        mixed = [attend(turned(rms(q[:, p]), 1e4), turned(rms(k[:, p]), 1e4), v[:, p], valid) for p in parts]
        x = x + g1 * linear(weights, f"{block}.self_attn.out_proj", torch.cat(mixed, -1))
        q = linear(weights, f"{block}.cross_attn.q_proj", rms(x) * (1 + c2) + s2)
        mixed = [attend(rms(q[:, p]), rms(keys[:, p]), values[:, p], visible) for p in parts]
        x = x + g2 * linear(weights, f"{block}.cross_attn.out_proj", torch.cat(mixed, -1))
        y = rms(x) * (1 + c3) + s3
        gated = silu(linear(weights, f"{block}.mlp.gate_proj", y)) * linear(weights, f"{block}.mlp.up_proj", y)
        x = (x + g3 * linear(weights, f"{block}.mlp.down_proj", gated)) * keep
    shift, scale = linear(weights, "final_layer.modulation.linear", silu(condition)).chunk(2)
    return linear(weights, "final_layer.linear", rms(x) * (1 + scale) + shift) * keep


def flow_loss(
    weights: Weights,
    actions: Tensor,
    noise: Tensor,
    times: Tensor,
    cache: Sequence[tuple[Tensor, Tensor]],
    visible: Tensor,
    valid: Tensor,
    used: Tensor,
    heads: int,
) -> Tensor:
    """Return the flow-matching loss of one example: the mean over F draws and all T steps.

    Shapes: actions (T, D), noise (F, T, D), times (F,), used (D,).
    """
    keep = used.to(actions.dtype)
    total = actions.new_zeros(())
    for draw, time in zip(noise, times, strict=True):
        a, n = actions * keep, draw * keep
        v = velocity(weights, (1 - time) * n + time * a, time, cache, visible, valid, heads)
        squares = (v - (a - n)) ** 2 * valid[:, None].to(actions.dtype)
        total = total + (squares * keep).sum() / (used.sum() * len(actions))
    return total / len(times)


def sample(
    weights: Weights,
    noise: Tensor,
    steps: int,
    cache: Sequence[tuple[Tensor, Tensor]],
    visible: Tensor,
    valid: Tensor,
    used: Tensor,
    heads: int,
) -> Tensor:
    """Integrate Euler steps from noise (T, D) at time 0 to actions at time 1."""
    keep = used.to(noise.dtype)
    x = noise * keep
    for step in range(steps):
        time = torch.tensor(step / steps, dtype=noise.dtype)
        x = x + velocity(weights, x, time, cache, visible, valid, heads) * keep / steps
    return x


def discrete_loss(logits: Tensor, labels: Tensor, owners: Tensor, z_scale: float) -> tuple[Tensor, Tensor]:
    """Return cross-entropy plus z-loss of K tokens. A token has the weight 2 / sqrt(number of tokens of its example);
    the weighted sum is divided by max(sum of weights, 1)."""
    cross_entropy, z, total = logits.new_zeros(()), logits.new_zeros(()), 0.0
    for row, label, owner in zip(logits, labels, owners, strict=True):
        weight = 2.0 / math.sqrt(int((owners == owner).sum()))
        normalizer = torch.log(torch.exp(row).sum())
        cross_entropy = cross_entropy + weight * (normalizer - row[label])
        z = z + weight * z_scale * normalizer**2
        total += weight
    return cross_entropy / max(total, 1.0), z / max(total, 1.0)
