"""Gated DeltaNet in a sequence of packed rows, in which a beginning that several rows share is stored once.

A segment continues where the segment before it on its path ends: from its recurrent state, and in the convolution from
the last tokens of the path, of which a short segment has only some. Gradients flow back through both, so a shared
beginning gets the sum of what its continuations ask for. Segments of the same depth are computed in one call.

The layers are Qwen3.5's (https://arxiv.org/abs/2412.06464 describes the rule). On a GPU with the package fla-core the
recurrence uses its kernels, as transformers does then; elsewhere it is transformers' own in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import unwrap
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils.rnn import pad_sequence
from transformers.activations import ACT2FN
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

from armature.components.models.context_parallel import to_device
from armature.components.models.packed_attention import Segments

# --- Where a segment continues ---


@dataclass(frozen=True)
class Level:
    """Segments of the same depth, i.e. with the same number of segments before them on their paths.

    Attributes:
        tokens: (n,) int64: the packed tokens, segment after segment.
        lengths: number of tokens of each segment.
        parents: (s,) int64: the segment that each continues, as its position in the level above; None in the first
            level, where rows begin.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    parents: Tensor | None


def levels_of(segments: Segments) -> list[Level]:
    """Return the levels of the tree of segments, the first one with the beginnings of rows. All layers share them."""
    if "levels" not in segments.shared:
        segments.shared["levels"] = _levels(segments.lengths, segments.parents, segments.keys.device)
    levels: list[Level] = segments.shared["levels"]
    return levels


def _levels(lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> list[Level]:
    starts = [0, *accumulate(lengths)]
    depths: list[int] = []
    members: list[list[int]] = []  # the segments of each depth
    for number, parent in enumerate(parents):  # parents come before their children
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if depths[-1] == len(members):
            members.append([])
        members[depths[-1]].append(number)
    position = {number: at for level in members for at, number in enumerate(level)}
    levels = []
    for depth, numbers in enumerate(members):
        tokens = torch.cat([torch.arange(starts[number], starts[number + 1]) for number in numbers])
        above = torch.tensor([position[parents[number]] for number in numbers]) if depth else None
        above = None if above is None else to_device(above, device)
        levels.append(Level(to_device(tokens, device), tuple(lengths[number] for number in numbers), above))
    return levels


def windows_of(segments: Segments, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a causal convolution of `width` tokens sees at the beginning of each segment. All layers share it.

    Returns:
        The first `width - 1` tokens of each segment, (n,) int64; the tokens of their paths that end with each of them,
        (n, width) int64; and a mask (n, width), False where the row has not begun yet.
    """
    name = f"windows of {width}"
    if name not in segments.shared:
        keys, device = segments.keys, segments.keys.device
        tokens, places = [], []
        key_end = end = 0
        for length, seen in zip(segments.lengths, segments.key_lengths, strict=True):
            key_begin, key_end, end = key_end, key_end + seen, end + length
            for token in range(min(width - 1, length)):
                tokens.append(end - length + token)
                last = key_end - length + token
                places.append([at if at >= key_begin else -1 for at in range(last - width + 1, last + 1)])
        at = to_device(torch.tensor(places), device)
        segments.shared[name] = to_device(torch.tensor(tokens), device), keys[at.clamp(0)], at >= 0
    windows: tuple[Tensor, Tensor, Tensor] = segments.shared[name]
    return windows


# --- The layer ---

_LAYERS = (Qwen3_5GatedDeltaNet, Qwen3_5MoeGatedDeltaNet)
"""Two classes with the same code."""


def has_delta_layers(model: nn.Module) -> bool:
    """Check that a model has Gated DeltaNet layers that this module supports."""
    return any(isinstance(module, _LAYERS) for module in model.modules())


def use_packed_delta(model: nn.Module) -> None:
    """Let the Gated DeltaNet layers of a model keep the segments of packed rows apart.

    Without this, transformers would pass convolution and state on from one packed row to the next, silently.
    """
    for module in model.modules():
        if type(module) in _LAYERS:
            module.__class__ = PackedGatedDeltaNet


class PackedGatedDeltaNet(Qwen3_5GatedDeltaNet):
    """Gated DeltaNet that takes `segments` of a packed sequence; without them it is transformers' layer."""

    def forward(self, hidden_states: Tensor, *rest: Any, segments: Segments | None = None, **more: Any) -> Tensor:
        """Return the layer's output (1, T, D) for the hidden states (1, T, D) of T packed tokens."""
        if segments is None:
            unpacked: Tensor = super().forward(hidden_states, *rest, **more)
            return unpacked
        segments.layers += 1
        x = hidden_states[0]
        g = -self.A_log.float().exp() * softplus(self.in_proj_a(x).float() + self.dt_bias)
        out = self._mix(self.in_proj_qkv(x), g, self.in_proj_b(x).sigmoid(), segments)
        z = self.in_proj_z(x).unflatten(-1, (-1, self.head_v_dim))
        out = self.norm(out.flatten(0, 1), z.flatten(0, 1))
        projected: Tensor = self.out_proj(out.view(len(x), -1))
        return projected[None]

    @torch.compiler.disable
    def _mix(self, mixed: Tensor, g: Tensor, beta: Tensor, segments: Segments) -> Tensor:
        """Mix tokens along their paths: convolution and recurrence.

        Args:
            mixed: (T, C): queries, keys and values of all heads before the convolution.
            g, beta: (T, HV): logarithm of the decay, and step size of the update.

        Returns:
            (T, HV, V) outputs of the recurrence.
        """
        mixed = self._convolve(mixed, segments)
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k = (part.unflatten(-1, (-1, self.head_k_dim)) for part in (q, k))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        outs, levels = [], levels_of(segments)
        states: Tensor | None = None
        for level in levels:
            at = level.tokens
            begins = None if states is None else states[level.parents]
            out, states = delta_rule(q[at], k[at], v[at], g[at], beta[at], level.lengths, begins)
            outs.append(out)
        return torch.cat(outs)[torch.cat([level.tokens for level in levels]).argsort()]

    def _convolve(self, x: Tensor, segments: Segments) -> Tensor:
        """Apply the causal convolution and its activation to `x` (T, C), each token with the tokens before it on its
        path."""
        weight = self.conv1d.weight.squeeze(1)
        out = modeling_qwen3_5.causal_conv1d_fn(x.t()[None], weight, self.conv1d.bias, activation=self.activation)
        # Only the first tokens of a segment have other tokens before them on their path than in the sequence.
        tokens, windows, seen = windows_of(segments, self.conv_kernel_size)
        begin = (x[windows].float() * weight.t().float()).masked_fill(~seen[..., None], 0.0).sum(1)
        return out[0].t().index_copy(0, tokens, ACT2FN[self.activation](begin).to(out.dtype))


# --- The recurrence: S = exp(g) S + beta k (v - exp(g) k S), o = q S ---


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule for several segments, which lie one after the other.

    Queries and keys are normalized here.

    Args:
        q, k: (T, H, K).
        v: (T, HV, V).
        g, beta: (T, HV).
        lengths: number of tokens of each segment.
        states: (S, HV, K, V) state at the beginning of each segment; None: zeros.

    Returns:
        Outputs (T, HV, V), and the states (S, HV, K, V) at the ends of the segments.
    """
    rule = _fla_rule if q.is_cuda and has_fla() else torch_rule
    return rule(q, k, v, g, beta, lengths, states)


@cache
def has_fla() -> bool:
    """Check that the package fla-core is installed."""
    return find_spec("fla") is not None


def torch_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` in plain torch, with a row for each segment.

    Padding has neither decay nor update, so the state behind it is that at the segment's end.
    """
    rows = [pad_sequence(tensor.split(list(lengths)), batch_first=True) for tensor in (q, k, v, g, beta)]
    rule = unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)  # not its replacement if fla is installed
    out, ends = rule(*rows, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)]), ends


def _fla_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` with the kernels of fla-core, in one launch for all segments."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    ends = torch.tensor([0, *accumulate(lengths)])
    out, final = chunk_gated_delta_rule(
        *(tensor[None] for tensor in (q, k, v, g, beta)),
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=to_device(ends, q.device),
        cu_seqlens_cpu=ends,
    )
    return out[0], final
