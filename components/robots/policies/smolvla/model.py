"""SmolVLA: the first layers of a SmolVLM, and an action expert that attends to the keys and values of each of them.

Images, text and the robot's state are the prefix. Images and text attend to each other, the state to all of them. The
actions follow: in some layers they attend to the prefix and to earlier actions, in the others only to the prefix.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaModel, SmolVLMConfig, SmolVLMForConditionalGeneration

from armature.components.robots.policies.flow import FlowSamples, noisy_actions
from armature.components.robots.policies.model import (
    LossDenominators,
    PolicyLosses,
    PolicyModel,
    Precision,
    call,
    checkpointed,
    compile_calls,
)
from armature.components.robots.policies.settings import Semantics
from armature.components.robots.policies.smolvla.configuration import SmolVLAConfig
from armature.components.robots.policies.smolvla.processor import SmolVLABatch

WAVELENGTH = 10_000.0
"""Base of the rotary embeddings, whatever the VLM was trained with."""
WIDTH_MULTIPLE = 256
"""The width of the expert's feed-forward layers, 8/3 of its hidden size, is rounded up to a multiple of this."""


Rotary = tuple[Tensor, Tensor]
"""Sines and cosines of rotary embeddings, (N, L, 1, head size / 2) each."""
KeyValues = tuple[Tensor, Tensor]
"""Keys and values, (N, S, heads, head size) each, keys after rotation."""


@dataclass(frozen=True)
class Prefix:
    """Keys and values of images, text and state, which all denoising steps share.

    cache: keys and values of each VLM layer.
    seen: (N, S) bool, False for padding.
    """

    cache: Sequence[KeyValues]
    seen: Tensor

    def repeated(self, times: int) -> Prefix:
        """Return the prefix with each row repeated `times` times."""
        cache = [(keys.repeat_interleave(times, 0), values.repeat_interleave(times, 0)) for keys, values in self.cache]
        return Prefix(cache, self.seen.repeat_interleave(times, 0))


class SmolVLAExpert(nn.Module):
    """Layers for the actions, and the projections of state, actions and time, named as in LeRobot's checkpoints."""

    def __init__(self, config: SmolVLAConfig, text: Any, layers: int) -> None:
        super().__init__()
        sizes = copy.deepcopy(text)
        sizes.hidden_size = hidden = int(text.hidden_size * config.expert_width_multiplier)
        sizes.intermediate_size = -(-int(4 * int(2 * hidden / 3)) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        sizes.num_hidden_layers = layers
        self.lm_expert = LlamaModel(sizes)
        del self.lm_expert.embed_tokens, self.lm_expert.rotary_emb
        width = text.num_key_value_heads * text.head_dim
        for number, layer in enumerate(self.lm_expert.layers):
            if not config.attends_itself(number):
                layer.self_attn.k_proj = nn.Linear(width, width, bias=text.attention_bias)
                layer.self_attn.v_proj = nn.Linear(width, width, bias=text.attention_bias)
        self.state_proj = nn.Linear(config.max_state_dim, text.hidden_size)
        self.action_in_proj = nn.Linear(config.max_action_dim, hidden)
        self.action_out_proj = nn.Linear(hidden, config.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * hidden, hidden)
        self.action_time_mlp_out = nn.Linear(hidden, hidden)
        self.config, self.call, self.gradient_checkpointing = config, call, False

    def velocity(self, points: Tensor, times: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
        """Return the velocity towards the actions at points (N, T, max_action_dim) and times (N,), and the last states.

        The states (N, T, hidden) are the inputs of the output layer.
        """
        x, (rows, count) = self._embedded(points, times), points.shape[:2]
        steps, size = torch.arange(count, device=points.device), self.lm_expert.layers[0].self_attn.head_dim
        before = prefix.seen[:, None].expand(-1, count, -1)
        earlier = (steps[None, :] <= steps[:, None]).expand(rows, -1, -1)
        behind = rotary(prefix.seen.sum(1, keepdim=True) + steps, size), torch.cat([before, earlier], -1)
        first = rotary(steps.expand(rows, -1), size), before
        for number, layer in enumerate(self.lm_expert.layers):
            kind, place = (self_attention, behind) if self.config.attends_itself(number) else (cross_attention, first)
            x = checkpointed(self.call, self.gradient_checkpointing, kind, layer, x, prefix.cache[number], *place)
        states = self.lm_expert.norm(x)
        return -self.action_out_proj(states.float()), states  # LeRobot's time, and so its velocity, is reversed

    def _embedded(self, points: Tensor, times: Tensor) -> Tensor:
        """Return the input of the first layer, (N, T, hidden), from noisy actions and the waves of their time."""
        x, config = self.action_in_proj(points), self.config
        place = torch.linspace(0.0, 1.0, x.shape[-1] // 2, dtype=torch.float64, device=x.device)
        period = config.min_period * (config.max_period / config.min_period) ** place
        angles = (1.0 - times.double())[:, None].float().double() * (2 * math.pi / period)
        waves = torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype)[:, None].expand_as(x)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(torch.cat([x, waves], -1))))


class SmolVLA(PolicyModel):
    """The model with its training loss."""

    vlm: SmolVLMForConditionalGeneration
    action_expert: SmolVLAExpert
    config: SmolVLAConfig

    def __init__(self, config: SmolVLAConfig, vlm: SmolVLMConfig, dtype: Precision = "float32") -> None:
        """Make a model with random weights.

        Args:
            vlm: Configuration of the whole VLM; `config.num_vlm_layers` of its text layers are used.
            dtype: "bfloat16": the VLM's weights are bfloat16, and the whole model computes under autocast.
        """
        super().__init__()
        self.config, self.precision, self.call, self.gradient_checkpointing = config, dtype, call, False
        self.vlm = SmolVLMForConditionalGeneration(vlm)
        text = self.vlm.model.text_model
        if config.num_vlm_layers > 0:
            text.layers = text.layers[: config.num_vlm_layers]
        del text.rotary_emb
        self.action_expert = SmolVLAExpert(config, vlm.text_config, len(text.layers))
        last = f"vlm.model.text_model.layers.{len(text.layers) - 1}."
        # LeRobot freezes these too, though the last layer's keys and values have a gradient.
        self.untrained = ("vlm.lm_head.", "vlm.model.text_model.norm.", last)
        self.vlm.to(getattr(torch, dtype))

    def embeddings(self, semantics: Semantics) -> list[str]:
        """Return the names of the parameters that `freeze_embedding` freezes."""
        return ["vlm.model.text_model.embed_tokens.weight"]

    def denominators(self, batch: SmolVLABatch, plan: None) -> LossDenominators:
        """Return the number of valid numbers in the actions of a batch, each times its example's weight."""
        assert batch.valid is not None
        valid = batch.valid if batch.weights is None else batch.valid * batch.weights[:, None]
        return LossDenominators(float(valid.sum()) * batch.action_dimensions)

    def forward(
        self, batch: SmolVLABatch, draws: FlowSamples | None, plan: None, denominators: LossDenominators | None = None
    ) -> PolicyLosses:
        """Compute the flow-matching loss of a batch: the mean of squared errors over steps that are not padded."""
        assert batch.actions is not None and batch.valid is not None and draws is not None
        points, target = noisy_actions(batch.actions, draws, None)
        ((velocity, _),) = self.velocities(batch, points, draws.times, plan)
        squares = (velocity.float() - target)[..., : batch.action_dimensions].square()
        sums = (squares.mean(1).sum(-1) * batch.valid).sum(-1)
        weighted = sums if batch.weights is None else sums * batch.weights
        flow = weighted.sum() / ((denominators or self.denominators(batch, plan)).flow or 1.0)
        counts = (batch.valid.sum(-1) * batch.action_dimensions).clamp(min=1)
        nothing = torch.zeros_like(sums)  # there are no action tokens
        return PolicyLosses(flow, flow, nothing.sum(), nothing.sum(), (sums / counts).detach(), nothing, nothing)

    def velocities(
        self, batch: SmolVLABatch, points: Tensor, times: Tensor, plan: object, others: Sequence[SmolVLAExpert] = ()
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute velocities with gradients; see `PolicyModel.velocities`."""
        outputs = []
        with self.autocast(batch.state.device):
            for expert in (self.action_expert, *others):  # each has its own projection of the state, so its own prefix
                prefix = self.encode(batch, expert).repeated(times.shape[1])
                velocity, states = expert.velocity(points.flatten(0, 1), times.flatten(), prefix)
                outputs.append((velocity.unflatten(0, times.shape), states.unflatten(0, times.shape)))
        return outputs

    def states_width(self, of_tokens: bool) -> int:
        """Return the width of the action expert's states."""
        return self.action_expert.action_out_proj.in_features

    def encode(self, batch: SmolVLABatch, expert: SmolVLAExpert) -> Prefix:
        """Run the VLM on images, text and state, which `expert` projects.

        Images and text do not attend to the state, so they need no gradient where only the expert is trained.
        """
        body = self.vlm.model
        text = body.text_model
        images = batch.images.to(body.vision_model.dtype).flatten(0, 1)
        hidden = body.connector(self._image_states(images)).unflatten(0, batch.images.shape[:2]).flatten(1, 2)
        words, state = text.embed_tokens(batch.input_ids), expert.state_proj(batch.state)[:, None].to(hidden.dtype)
        x = torch.cat([hidden, words], 1) * math.sqrt(words.shape[-1])
        seen = torch.cat([batch.seen.new_ones(hidden.shape[:2]), batch.seen, batch.seen.new_ones(len(x), 1)], 1)
        sin, cos = rotary(seen.cumsum(1) - 1, text.layers[0].self_attn.head_dim)
        shown = (sin[:, :-1], cos[:, :-1]), seen[:, None, :-1]
        last = (sin[:, -1:], cos[:, -1:]), seen[:, None]
        cache = list[KeyValues]()
        for number, layer in enumerate(text.layers, 1):
            inputs = prefix_layer, layer, x, state, shown, last, number < len(text.layers)
            x, state, read = checkpointed(self.call, self.gradient_checkpointing, *inputs)
            cache.append(read)
        return Prefix(cache, seen)

    def _image_states(self, images: Tensor) -> Tensor:
        """Return the vision model's last states, (N, patches, hidden), of images without padding.

        Its own `forward` waits for the GPU to see that there is no padding, so it cannot be part of a CUDA graph.
        """
        vision = self.vlm.model.vision_model
        sides = (side // vision.patch_size for side in images.shape[2:])
        patches = torch.ones(len(images), *sides, dtype=torch.bool, device=images.device)
        x = vision.embeddings(pixel_values=images, patch_attention_mask=patches)
        for layer in vision.encoder.layers:
            x = checkpointed(self.call, self.gradient_checkpointing, layer, x, None)
        states: Tensor = vision.post_layernorm(x)
        return states

    def checkpoint_gradients(self, active: bool) -> None:
        """Turn activation checkpointing of the layers on or off."""
        self.gradient_checkpointing = self.action_expert.gradient_checkpointing = active

    def compile_layers(self, *, dynamic: bool, split: bool = False) -> None:
        """Compile the layers; see `PolicyModel.compile_layers`."""
        compile_calls(self, self.action_expert, dynamic=dynamic)


def prefix_layer(
    layer: Any, x: Tensor, state: Tensor, shown: tuple[Rotary, Tensor], last: tuple[Rotary, Tensor], more: bool
) -> tuple[Tensor, Tensor, KeyValues]:
    """Return a text layer's outputs for images and text and for the state, and the keys and values of all.

    Args:
        shown: rotary embeddings of images and text, and the mask of what they attend to.
        last: the same of the state, which comes last.
        more: False for the last layer, of which only keys and values are needed.
    """
    queries, keys, values = projected(layer, x)
    state_queries, state_keys, state_values = projected(layer, state)
    keys, state_keys = rotated(keys, shown[0]), rotated(state_keys, last[0])
    every = torch.cat([keys, state_keys], 1), torch.cat([values, state_values], 1)
    if more:
        x = finished(layer, x, attended(rotated(queries, shown[0]), keys, values, shown[1]))
        state = finished(layer, state, attended(rotated(state_queries, last[0]), *every, last[1]))
    return x, state, every


def self_attention(layer: Any, x: Tensor, prefix: KeyValues, place: Rotary, mask: Tensor) -> Tensor:
    """Return the output of a layer in which actions attend to the prefix and to each other."""
    queries, keys, values = projected(layer, x)
    keys, values = torch.cat([prefix[0], rotated(keys, place)], 1), torch.cat([prefix[1], values], 1)
    return finished(layer, x, attended(rotated(queries, place), keys, values, mask))


def cross_attention(layer: Any, x: Tensor, prefix: KeyValues, place: Rotary, mask: Tensor) -> Tensor:
    """Return the output of a layer in which actions attend only to the prefix, whose keys and values it projects."""
    attention = layer.self_attn
    queries = attention.q_proj(layer.input_layernorm(x)).unflatten(-1, (-1, attention.head_dim))
    keys, values = attention.k_proj(prefix[0].flatten(2)), attention.v_proj(prefix[1].flatten(2))
    keys, values = keys.view_as(prefix[0]), values.view_as(prefix[1])
    return finished(layer, x, attended(rotated(queries, place), keys, values, mask))


def projected(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a layer, (N, L, heads, head size) each, without rotation."""
    attention, x = layer.self_attn, layer.input_layernorm(x)
    heads = (-1, attention.head_dim)
    queries, keys, values = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    return queries.unflatten(-1, heads), keys.unflatten(-1, heads), values.unflatten(-1, heads)


def finished(layer: Any, x: Tensor, attention: Tensor) -> Tensor:
    """Return a layer's output from its input and its attention, (N, L, hidden) and (N, L, heads x head size)."""
    x = x + layer.self_attn.o_proj(attention)
    return x + layer.mlp(layer.post_attention_layernorm(x))


def attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of queries (N, L, heads, head size) to keys and values, where mask (N, L, S) is True."""
    groups = queries.shape[2] // keys.shape[2]
    q = queries.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # heads with equal keys are rows
    mask = mask if mask.shape[1] == 1 else mask.repeat(1, groups, 1)
    y = F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), mask[:, None])
    return y.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4).flatten(2)


def rotary(positions: Tensor, size: int) -> Rotary:
    """Return the rotary embeddings of positions (N, L) for heads of a size, in float32."""
    exponents = torch.arange(size // 2, dtype=torch.float32, device=positions.device) * (2.0 / size)
    angles = (positions[..., None].float() / WAVELENGTH**exponents)[:, :, None]
    return angles.sin(), angles.cos()


def rotated(x: Tensor, place: Rotary) -> Tensor:
    """Return x (N, L, heads, head size) with rotary embeddings, computed in float32."""
    (first, second), (sin, cos) = x.float().chunk(2, -1), place
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
