"""The action expert: a transformer over the actions of a chunk that attends to the text model's keys and values.

Block l attends to the keys and values of text layer l. Norms have no weights; the flow time enters through shifts,
scales and gates (adaptive normalization). Modules are named as in released checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from armature.components.models.flash import TRITON
from armature.components.robots.policies.model import call, checkpointed
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.layers import ContextIndex, rms, rotary_angles, rotate
from armature.components.robots.policies.molmoact2.modeling.vlm import KeyValue

if TRITON:
    from armature.components.robots.policies.molmoact2.modeling import attention_kernels
else:
    attention_kernels = None  # type: ignore[assignment]

ROPE_BASE = 10_000.0


class TimeFeatures(nn.Module):
    """Maps times (...) in [0, 1] to sines and cosines (..., size) of geometric frequencies from 1 to 1e-4."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, times: Tensor) -> Tensor:
        half = self.size // 2
        steps = torch.arange(half, dtype=times.dtype, device=times.device)
        angles = times[..., None] * torch.exp(-math.log(10_000.0) / (half - 1) * steps)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Modulation(nn.Module):
    """Maps the condition (N, hidden) to shifts, scales and gates (N, parts, 1, hidden)."""

    def __init__(self, hidden: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(hidden, parts * hidden)

    def forward(self, condition: Tensor) -> Tensor:
        y: Tensor = self.linear(functional.silu(condition))
        return y.unflatten(-1, (self.parts, 1, -1))


class SelfAttention(nn.Module):
    """Attention of each action to all actions of its chunk, except padded ones."""

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
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Attention of action chunks to the keys and values of E contexts.

    The input x, (E x F, T, hidden), has F chunks for each context; the chunks of a context are adjacent.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        # All F chunks of a context become queries of one row, so keys and values need not be repeated.
        flat = self.q_proj(x).view(len(keys), -1, x.shape[-1])
        if has_kernel(flat, flat.shape[1]):
            return self.out_proj(attention_kernels.cross_attention(flat, keys, values, mask).view_as(x))
        queries = rms(split_heads(flat, self.heads))
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out_proj(attended.transpose(1, 2).flatten(2).view_as(x))


class GatedMLP(nn.Module):
    """Feed-forward layer with SiLU gates."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden, inner)
        self.gate_proj = nn.Linear(hidden, inner)
        self.down_proj = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class ExpertBlock(nn.Module):
    """Block of self-attention, cross-attention and MLP, each modulated by the flow time."""

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
        """Return the block's output (N, T, hidden).

        Args:
            x: (N, T, hidden).
            modulation: Output of `self.modulation`, (N or 1, 9, 1, hidden).
            keys, values: Context, (E, heads, S, head size).
            context_mask: (E, 1, 1, S) bool.
            valid: (N, T) bool, False for padded steps; None: all steps are valid.
        """
        shift1, scale1, gate1, shift2, scale2, gate2, shift3, scale3, gate3 = modulation.unbind(1)
        mask = None if valid is None else valid[:, None, None, :]
        x = torch.addcmul(x, gate1, self.self_attn(modulated(x, shift1, scale1), rope, mask))
        x = torch.addcmul(x, gate2, self.cross_attn(modulated(x, shift2, scale2), keys, values, context_mask))
        x = torch.addcmul(x, gate3, self.mlp(modulated(x, shift3, scale3)))
        return zero_padded(x, valid)


class FinalLayer(nn.Module):
    """Modulated projection of the last states to the velocity."""

    def __init__(self, hidden: int, dimensions: int) -> None:
        super().__init__()
        self.modulation = Modulation(hidden, 2)
        self.linear = nn.Linear(hidden, dimensions)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        shift, scale = modulation.unbind(1)
        y: Tensor = self.linear(modulated(x, shift, scale))
        return y


class BlockInputs(NamedTuple):
    """Inputs that are the same for all blocks.

    condition: (N, hidden), embedding of the flow times.
    rope: cosines and sines of the rotary angles of the chunk's steps.
    context: tokens of the batch that each example's actions attend to.
    valid: (N, T) bool, False for padded steps; None: all steps are valid.
    """

    condition: Tensor
    rope: KeyValue
    context: ContextIndex
    valid: Tensor | None


class ActionExpert(nn.Module):
    """Predicts the flow-matching velocity at noisy actions.

    In training call `forward` or `velocity_and_states`; `MolmoAct2` runs its parts `begin`, `read` and `end` itself
    when it checkpoints text layers and blocks together. In sampling, precompute `modulations` and `contexts`, which all
    denoising steps share, and call `velocity` in each step.
    """

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
        """Compile the function `read_context`, which has no weights; for the arguments see `torch.compile`."""
        self._read_context = torch.compile(read_context, dynamic=dynamic, options=options)

    def forward(
        self,
        actions: Tensor,
        times: Tensor,
        cache: Sequence[KeyValue],
        context: ContextIndex,
        valid: Tensor | None,
    ) -> Tensor:
        """Return the velocity at noisy actions, (E, F, T, dimensions); see `velocity_and_states`."""
        return self.velocity_and_states(actions, times, cache, context, valid)[0]

    def velocity_and_states(
        self,
        actions: Tensor,
        times: Tensor,
        cache: Sequence[KeyValue],
        context: ContextIndex,
        valid: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the velocity, (E, F, T, dimensions), and the states before the final layer, (E, F, T, hidden).

        Args:
            actions: Noisy actions, (E, F, T, dimensions): F for each of E examples.
            times: (E, F) in [0, 1].
            cache: Keys and values of each text layer, (B, key-value heads, L, head size).
            context: Tokens of the batch that each example's actions attend to.
            valid: (E, T), False for padded steps; None: all steps are valid.
        """
        active = self.gradient_checkpointing and self.training
        x, inputs = self.begin(actions, times, context, valid)
        for block, layer in zip(self.blocks, cache, strict=True):
            x = checkpointed(self.call, active, self.read, block, x, layer, inputs)
        return self.end(x, inputs).unflatten(0, times.shape), x.unflatten(0, times.shape)

    def begin(
        self, actions: Tensor, times: Tensor, context: ContextIndex, valid: Tensor | None
    ) -> tuple[Tensor, BlockInputs]:
        """Return the first block's input x, (E x F, T, hidden), and the other inputs, which all blocks share."""
        steps = None if valid is None else valid.repeat_interleave(times.shape[1], dim=0)
        condition = self._condition(times.flatten())
        x, rope = self._embed(actions.flatten(0, 1), steps)
        return x, BlockInputs(condition, rope, context, steps)

    def read(self, block: ExpertBlock, x: Tensor, layer: KeyValue, inputs: BlockInputs) -> Tensor:
        """Return the output of `block`, (E x F, T, hidden), for E examples with F chunks each.

        Args:
            layer: keys and values of the text layer to which the block attends.
        """
        keys, values = self._context(*joined_heads(layer), inputs.context)
        mask = inputs.context.valid[:, None, None, :]
        y: Tensor = block(x, block.modulation(inputs.condition), inputs.rope, keys, values, mask, inputs.valid)
        return y

    def end(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """Return the velocity, (E x F, T, dimensions), computed from the last block's output x by the final layer."""
        return zero_padded(self.final_layer(x, self.final_layer.modulation(inputs.condition)), inputs.valid)

    def velocity(
        self, actions: Tensor, modulations: Sequence[Tensor], contexts: Sequence[KeyValue], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the velocity, (N, T, dimensions), and the states before the final layer, (N, T, hidden).

        This method is for sampling: each example has one chunk, and all chunks have the same flow time.

        Args:
            actions: (N, T, dimensions).
            modulations: Result of `modulations` for the time, (1, parts, 1, hidden) each.
            contexts: Result of `contexts`.
            mask: (N, 1, 1, S) bool, True for context tokens to attend to.
        """
        x, rope = self._embed(actions, None)
        *of_blocks, last = modulations
        for block, modulation, (keys, values) in zip(self.blocks, of_blocks, contexts, strict=True):
            x = self.call(block, x, modulation, rope, keys, values, mask, None)
        return self.final_layer(x, last), x

    def modulations(self, times: Tensor) -> list[Tensor]:
        """Return the shifts, scales and gates of each block and the final layer at flow times (N,).

        They are one tensor (N, parts, 1, hidden) for each block, then one for the final layer.
        """
        condition = self._condition(times)
        return [module.modulation(condition) for module in (*self.blocks, self.final_layer)]

    def contexts(self, cache: Sequence[KeyValue], context: ContextIndex) -> list[KeyValue]:
        """Project the keys and values of all text layers for the expert's cross-attention, in one call.

        Returns for each layer the keys and the values, (E, heads, S, head size) each.
        """
        keys, values = (torch.stack(part) for part in zip(*map(joined_heads, cache), strict=True))
        return list(zip(*self._context(keys, values, context), strict=True))

    def _context(self, keys: Tensor, values: Tensor, context: ContextIndex) -> KeyValue:
        """Project keys and values of text layers for the expert, and gather each example's context.

        Inputs have the shape (..., B, L, hidden), results (..., E, heads, S, head size).
        """
        return self._read_context(self.context_k_proj(keys), self.context_v_proj(values), context, self.heads)

    def _condition(self, times: Tensor) -> Tensor:
        condition: Tensor = self.time_embed(times.to(self.action_embed.weight.dtype))
        return condition

    def _embed(self, actions: Tensor, valid: Tensor | None) -> tuple[Tensor, KeyValue]:
        x = zero_padded(self.action_embed(actions.to(self.action_embed.weight.dtype)), valid)
        angles = rotary_angles(torch.arange(x.shape[1], device=x.device), x.shape[2] // self.heads, ROPE_BASE)
        return x, (angles.cos(), angles.sin())

    def initialize(self, generator: torch.Generator) -> None:
        """Initialize weights as Xavier uniform, divided by sqrt(2 L) for projections into the residual stream.

        Modulations and the output layer are 0, so every block initially returns its input, and the velocity is 0.
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
    """Return True if `attention_kernels` supports this input: bfloat16 on a GPU, few queries, and no gradients."""
    if attention_kernels is None or torch.is_grad_enabled():
        return False
    return x.is_cuda and x.dtype == torch.bfloat16 and queries <= attention_kernels.QUERIES


def read_context(keys: Tensor, values: Tensor, context: ContextIndex, heads: int) -> KeyValue:
    """Normalize projected keys and values, gather each example's context, and split the heads.

    Keys are normalized a second time within each head.

    Inputs have the shape (..., B, L, hidden), results (..., E, heads, S, head size).
    """
    keys, values = (split_heads(context.gather(rms(each)), heads) for each in (keys, values))
    return rms(keys), values


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (..., S, heads x size) to (..., heads, S, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def joined_heads(layer: KeyValue) -> KeyValue:
    """Reshape keys and values (B, heads, L, size) to (B, L, heads x size).

    Outputs of text layers already have this order in memory, so they are not copied.
    """
    keys, values = (part.transpose(1, 2).flatten(2) for part in layer)
    return keys, values


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return rms(x) * (1 + scale) + shift."""
    return torch.addcmul(shift, rms(x), 1 + scale)


def zero_padded(x: Tensor, valid: Tensor | None) -> Tensor:
    """Set x (N, T, ...) to 0 at steps where `valid` (N, T) is False."""
    return x if valid is None else x * valid[..., None].to(x.dtype)
