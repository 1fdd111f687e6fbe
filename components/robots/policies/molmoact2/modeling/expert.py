"""The action expert: a transformer over the actions of a chunk that reads the text model's keys and values.

Block l reads text layer l. Its norms have no weights; time enters through shifts, scales and gates (adaptive
normalization). Names of modules are those of the released checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from armature.components.models.flash import TRITON
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.layers import ContextIndex, rms, rotary_angles, rotate
from armature.components.robots.policies.molmoact2.modeling.vlm import KeyValue, call, checkpointed

if TRITON:
    from armature.components.robots.policies.molmoact2.modeling import attention_kernels
else:
    attention_kernels = None  # type: ignore[assignment]

ROPE_BASE = 10_000.0


class TimeFeatures(nn.Module):
    """Times (...) in [0, 1], unscaled, to sines and cosines (..., size) of geometric frequencies from 1 to 1e-4."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, times: Tensor) -> Tensor:
        half = self.size // 2
        steps = torch.arange(half, dtype=times.dtype, device=times.device)
        angles = times[..., None] * torch.exp(-math.log(10_000.0) / (half - 1) * steps)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Modulation(nn.Module):
    """The condition (N, hidden) to shifts, scales and gates: (N, parts, 1, hidden)."""

    def __init__(self, hidden: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(hidden, parts * hidden)

    def forward(self, condition: Tensor) -> Tensor:
        y: Tensor = self.linear(functional.silu(condition))
        return y.unflatten(-1, (self.parts, 1, -1))


class SelfAttention(nn.Module):
    """Every action attends to every action of its chunk, except padded ones."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, rope: KeyValue, mask: Tensor | None) -> Tensor:
        joined = self.qkv(x)
        if mask is None and has_kernel(joined, x.shape[1]):
            return self.out_proj(attention_kernels.self_attention(joined, *rope, self.heads))
        queries, keys, values = (split_heads(part, self.heads) for part in joined.chunk(3, dim=-1))
        queries, keys = rotate(rms(queries), *rope), rotate(rms(keys), *rope)
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out_proj(seen.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Keys and values are given, those of E contexts; x has the chunks of F draws for each, in order of E."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        # The draws of one context are so many more queries: no key or value is repeated.
        flat = self.q_proj(x).view(len(keys), -1, x.shape[-1])
        if has_kernel(flat, flat.shape[1]):
            return self.out_proj(attention_kernels.cross_attention(flat, keys, values, mask).view_as(x))
        queries = rms(split_heads(flat, self.heads))
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out_proj(seen.transpose(1, 2).flatten(2).view_as(x))


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden, inner)
        self.gate_proj = nn.Linear(hidden, inner)
        self.down_proj = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class ExpertBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(hidden, heads)
        self.cross_attn = CrossAttention(hidden, heads)
        self.mlp = GatedMLP(hidden, inner)
        self.modulation = Modulation(hidden, 9)

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        rope: KeyValue,
        keys: Tensor,
        values: Tensor,
        context_mask: Tensor,
        valid: Tensor | None,
    ) -> Tensor:
        """x: (N, T, hidden). modulation: (N or 1, 9, 1, hidden), which `self.modulation` makes of the times.

        keys, values: (E, heads, S, head size). valid: (N, T) bool or None: all.
        """
        shift1, scale1, gate1, shift2, scale2, gate2, shift3, scale3, gate3 = modulation.unbind(1)
        mask = None if valid is None else valid[:, None, None, :]
        x = torch.addcmul(x, gate1, self.self_attn(modulated(x, shift1, scale1), rope, mask))
        x = torch.addcmul(x, gate2, self.cross_attn(modulated(x, shift2, scale2), keys, values, context_mask))
        x = torch.addcmul(x, gate3, self.mlp(modulated(x, shift3, scale3)))
        return zero_padded(x, valid)


class FinalLayer(nn.Module):
    def __init__(self, hidden: int, dimensions: int) -> None:
        super().__init__()
        self.modulation = Modulation(hidden, 2)
        self.linear = nn.Linear(hidden, dimensions)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        shift, scale = modulation.unbind(1)
        y: Tensor = self.linear(modulated(x, shift, scale))
        return y


class ReadingBlocks(NamedTuple):
    """What blocks are given besides their input and a text layer.

    condition: (N, hidden) of the times, rope: cosines and sines of the steps, valid: (N, T) bool or None: all.
    """

    condition: Tensor
    rope: KeyValue
    context: ContextIndex
    valid: Tensor | None


class ActionExpert(nn.Module):
    def __init__(self, config: MolmoAct2Config) -> None:
        super().__init__()
        sizes, text = config.action_expert_config, config.text_config
        hidden = sizes.hidden_size
        self.heads = sizes.num_heads
        self.time_embed = nn.Sequential(
            TimeFeatures(sizes.timestep_embed_dim),
            nn.Linear(sizes.timestep_embed_dim, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
        )
        self.action_embed = nn.Linear(config.max_action_dim, hidden)
        key_size = text.num_key_value_heads * text.head_dim
        self.context_k_proj = nn.Linear(key_size, hidden, bias=False)
        self.context_v_proj = nn.Linear(key_size, hidden, bias=False)
        self.blocks = nn.ModuleList(
            ExpertBlock(hidden, sizes.num_heads, sizes.inner_size) for _ in range(sizes.num_layers)
        )
        self.final_layer = FinalLayer(hidden, config.max_action_dim)
        self.gradient_checkpointing, self.call = False, call
        self._read_context = read_context

    def compile_context(self, *, dynamic: bool, options: dict[str, Any]) -> None:
        """Compile what has no weights of the way from text layers to the expert; see `torch.compile`."""
        self._read_context = torch.compile(read_context, dynamic=dynamic, options=options)

    def forward(
        self,
        actions: Tensor,
        times: Tensor,
        cache: Sequence[KeyValue],
        context: ContextIndex,
        valid: Tensor | None,
    ) -> Tensor:
        """The velocity at noisy actions: (E, F, T, dimensions). See `velocity_and_states`."""
        return self.velocity_and_states(actions, times, cache, context, valid)[0]

    def velocity_and_states(
        self,
        actions: Tensor,
        times: Tensor,
        cache: Sequence[KeyValue],
        context: ContextIndex,
        valid: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The velocity at noisy actions, (E, F, T, dimensions), and the states before the final layer, (E, F, T,
        hidden).

        Args:
            actions: (E, F, T, dimensions), F draws for each of E examples. times: (E, F) in [0, 1].
            cache: of every text layer, keys and values (B, key-value heads, L, head size).
            context: which of the B x L tokens each example's draws attend to.
            valid: (E, T), False on padded steps; None: all steps are valid.
        """
        active = self.gradient_checkpointing and self.training
        x, given = self.begin(actions, times, context, valid)
        for block, layer in zip(self.blocks, cache, strict=True):
            x = checkpointed(self.call, active, self.read, block, x, layer, given)
        return self.end(x, given).unflatten(0, times.shape), x.unflatten(0, times.shape)

    def begin(
        self, actions: Tensor, times: Tensor, context: ContextIndex, valid: Tensor | None
    ) -> tuple[Tensor, ReadingBlocks]:
        """The first block's input (E x F, T, hidden), and what all blocks are given; see `velocity_and_states`."""
        steps = None if valid is None else valid.repeat_interleave(times.shape[1], dim=0)
        condition = self._condition(times.flatten())
        x, rope = self._embed(actions.flatten(0, 1), steps)
        return x, ReadingBlocks(condition, rope, context, steps)

    def read(self, block: ExpertBlock, x: Tensor, layer: KeyValue, given: ReadingBlocks) -> Tensor:
        """The output of a block that reads the keys and values of a text layer."""
        keys, values = self._context(*joined_heads(layer), given.context)
        mask = given.context.valid[:, None, None, :]
        y: Tensor = block(x, block.modulation(given.condition), given.rope, keys, values, mask, given.valid)
        return y

    def end(self, x: Tensor, given: ReadingBlocks) -> Tensor:
        """The velocity (E x F, T, dimensions) of the last block's output."""
        return zero_padded(self.final_layer(x, self.final_layer.modulation(given.condition)), given.valid)

    def velocity(
        self, actions: Tensor, modulations: Sequence[Tensor], contexts: Sequence[KeyValue], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `velocity_and_states` with one draw, one time for all, whose `modulations` are given, and `contexts`.

        Args:
            modulations: of each block and the final layer, (1, parts, 1, hidden).
        """
        x, rope = self._embed(actions, None)
        *of_blocks, last = modulations
        for block, modulation, (keys, values) in zip(self.blocks, of_blocks, contexts, strict=True):
            x = self.call(block, x, modulation, rope, keys, values, mask, None)
        return self.final_layer(x, last), x

    def modulations(self, times: Tensor) -> list[Tensor]:
        """Of each block and the final layer, at times (N,): (N, parts, 1, hidden)."""
        condition = self._condition(times)
        return [module.modulation(condition) for module in (*self.blocks, self.final_layer)]

    def contexts(self, cache: Sequence[KeyValue], context: ContextIndex) -> list[KeyValue]:
        """`context` of every text layer, of all at once."""
        keys, values = (torch.stack(part) for part in zip(*map(joined_heads, cache), strict=True))
        return list(zip(*self._context(keys, values, context), strict=True))

    def _context(self, keys: Tensor, values: Tensor, context: ContextIndex) -> KeyValue:
        """Of text layers, (..., B, L, heads x size), as the expert's: (..., E, heads, S, head size)."""
        return self._read_context(self.context_k_proj(keys), self.context_v_proj(values), context, self.heads)

    def _condition(self, times: Tensor) -> Tensor:
        condition: Tensor = self.time_embed(times.to(self.action_embed.weight.dtype))
        return condition

    def _embed(self, actions: Tensor, valid: Tensor | None) -> tuple[Tensor, KeyValue]:
        x = zero_padded(self.action_embed(actions.to(self.action_embed.weight.dtype)), valid)
        angles = rotary_angles(torch.arange(x.shape[1], device=x.device), x.shape[2] // self.heads, ROPE_BASE)
        return x, (angles.cos(), angles.sin())

    def initialize(self, generator: torch.Generator) -> None:
        """Xavier uniform; projections into the residual stream shrunk by sqrt(2 L); what modulates, and the output, 0.

        The first velocity is therefore 0, and every block passes its input on.
        """
        shrunk = ("out_proj", "down_proj")
        zero = ("modulation.linear", "final_layer.linear")
        for name, module in self.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            if name.endswith(zero):
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight, generator=generator)
                if name.endswith(shrunk):
                    with torch.no_grad():
                        module.weight.mul_((2 * len(self.blocks)) ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def has_kernel(x: Tensor, queries: int) -> bool:
    """Whether so many queries attend in a kernel of `attention_kernels`: few of them, without gradients, on a GPU."""
    if attention_kernels is None or torch.is_grad_enabled():
        return False
    return x.is_cuda and x.dtype == torch.bfloat16 and queries <= attention_kernels.QUERIES


def read_context(keys: Tensor, values: Tensor, context: ContextIndex, heads: int) -> KeyValue:
    """Projected keys and values, (..., B, L, hidden), as the expert reads them: (..., E, heads, S, head size)."""
    keys, values = (split_heads(context.gather(rms(each)), heads) for each in (keys, values))
    return rms(keys), values


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(..., S, heads x size) to (..., heads, S, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def joined_heads(layer: KeyValue) -> KeyValue:
    """(B, heads, L, size) each to (B, L, heads x size); what text layers give lies so, and is not copied."""
    keys, values = (part.transpose(1, 2).flatten(2) for part in layer)
    return keys, values


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """The normed x times 1 + scale, shifted."""
    return torch.addcmul(shift, rms(x), 1 + scale)


def zero_padded(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zero where the step (N, T) is padding."""
    return x if valid is None else x * valid[..., None].to(x.dtype)
