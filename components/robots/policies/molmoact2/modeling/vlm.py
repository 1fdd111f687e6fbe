"""The vision-language half: native Molmo2 parts and names, with every text layer's keys and values as outputs.

Differences from transformers' forward pass that MolmoAct2's weights were trained with: pixels have the 256 values of 8
bits, norms and rotary positions are computed in float32, text layers have residual dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Molmo2Config
from transformers.models.molmo2.modeling_molmo2 import (
    Molmo2Adapter,
    Molmo2Attention,
    Molmo2DecoderLayer,
    Molmo2VisionMLP,
    Molmo2VisionModel,
)

from armature.components.contracts.errors import DataError
from armature.components.robots.policies.molmoact2.modeling.layers import RMSNorm, rotary_angles, rotate

KeyValue = tuple[Tensor, Tensor]
CUBLAS_GELU = "gelu_pytorch_tanh"
"""The activation that `torch._addmm_activation` has on a GPU; on a CPU it is another."""
CUDNN_FIRST = (9, 10)
"""Major compute capabilities."""


class BackboneOutput(NamedTuple):
    """A tuple, in which FSDP finds the tensors whose gradients it waits for.

    states: (B, L, hidden) after the last norm. cache: per layer, keys (normed and rotated) and values, each
    (B, key-value heads, L, head size); with a past, of past and present tokens.
    """

    states: Tensor
    cache: list[KeyValue]


class TextAttention(Molmo2Attention):
    """Grouped-query attention with normed heads; the angles are those of the tokens given."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, angles: KeyValue, mask: Tensor, past: KeyValue | None, gqa: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """gqa: there is a kernel that reads the keys and values of a group of heads once for all of them."""
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), *angles).transpose(1, 2)
        keys, values = self.keys_values(x, angles)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        own = (keys, values) if gqa else (self._repeated(keys), self._repeated(values))
        seen = functional.scaled_dot_product_attention(queries, own[0], own[1], attn_mask=mask, enable_gqa=gqa)
        return self.o_proj(seen.transpose(1, 2).flatten(2)), keys, values

    def keys_values(self, x: Tensor, angles: KeyValue) -> KeyValue:
        """Of the tokens given: (B, key-value heads, L, head size) each, which a token's heads lie together in."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), *angles)
        return keys.transpose(1, 2), self._heads(self.v_proj(x)).transpose(1, 2)

    def _repeated(self, heads: Tensor) -> Tensor:
        return heads.repeat_interleave(self.num_key_value_groups, dim=1)

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (-1, self.head_dim))


class TextLayer(Molmo2DecoderLayer):
    def __init__(self, config: Any, layer: int, dropout: float) -> None:
        super().__init__(config, layer)
        self.self_attn = TextAttention(config, layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        angles: KeyValue,
        mask: Tensor,
        past: KeyValue | None = None,
        cache_only: bool = False,
        gqa: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output, and keys and values of all tokens that it looked at; `cache_only`: in place of the output
        its input, and keys and values of the tokens given."""
        normed = self.input_layernorm(x)
        if cache_only:
            return x, *self.self_attn.keys_values(normed, angles)
        attended, keys, values = self.self_attn(normed, angles, mask, past, gqa)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x))), keys, values


class VisionMLP(Molmo2VisionMLP):
    """In bfloat16 on a GPU, without gradients, bias and GELU are part of the first product, and it is rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc1.weight
        fused = x.is_cuda and weight.dtype == torch.bfloat16 and not torch.is_grad_enabled()
        if fused and type(self.fc1) is nn.Linear and self.config.hidden_act == CUBLAS_GELU:
            rows = x.to(weight.dtype).flatten(0, -2)
            inner = torch._addmm_activation(self.fc1.bias, rows, weight.t(), use_gelu=True).unflatten(0, x.shape[:-1])
        else:
            inner = self.activation_fn(self.fc1(x))
        y: Tensor = self.fc2(inner)
        return y


class VisionTower(Molmo2VisionModel):
    """Patches (C, patches, pixels) to the outputs of the chosen layers, side by side: (C, patches, hidden x layers)."""

    def __init__(self, config: Any, features: list[int]) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = VisionMLP(config)
        self.features = features
        self.gradient_checkpointing, self.call = False, call

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embedding(pixels.to(self.positional_embedding.dtype)) + self.positional_embedding
        outputs, active = {}, self.gradient_checkpointing and self.training
        for layers in self._in_groups(2 if active else 1):
            x = checkpointed(self.call, active, _in_turn, [self.layers[index] for index in layers], x)
            if layers[-1] in self.features:
                outputs[layers[-1]] = x
        return torch.cat([outputs[index] for index in self.features], dim=-1)

    def _in_groups(self, most: int) -> Iterator[list[int]]:
        """The indices of all layers in order, in groups of at most `most`; one whose output is a feature ends its
        group."""
        waiting: list[int] = []
        for index in range(len(self.layers)):
            waiting.append(index)
            if len(waiting) == most or index in self.features or index + 1 == len(self.layers):
                yield waiting
                waiting = []


class ImagePooling(Molmo2Adapter):
    """As transformers' adapter, which also asks which image tokens have a patch and which pools are full."""

    def forward(self, features: Tensor, pooling: Tensor) -> Tensor:
        """(C, patches, hidden x layers) and (P, 4), of which one is a patch at least, to (P, hidden)."""
        valid = pooling >= 0
        patches = features.flatten(0, 1).index_select(0, pooling.clamp(min=0).flatten()).unflatten(0, pooling.shape)
        patches = patches * valid[..., None].to(patches.dtype)
        count = valid.sum(-1)[:, None, None].to(patches.dtype)
        query = patches.sum(-2, keepdim=True) / count
        pooled, _ = self.image_pooling_2d(query, patches, attention_mask=valid[:, None, None, :])
        y: Tensor = self.image_projector(pooled.squeeze(1))
        return y


class TokenEmbedding(nn.Module):
    """Base and additional vocabulary as two tables, since only one of them may be trained; named as in checkpoints."""

    def __init__(self, base: int, additional: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(base, hidden).normal_(std=0.02))
        self.new_embedding = nn.Parameter(torch.empty(additional, hidden).normal_(std=0.02))

    def forward(self, ids: Tensor) -> Tensor:
        base = len(self.embedding)
        is_base = ids < base
        known = functional.embedding(ids.clamp(max=base - 1), self.embedding)
        added = functional.embedding((ids - base).clamp(min=0), self.new_embedding)
        return torch.where(is_base[..., None], known, added)


class TextModel(nn.Module):
    def __init__(self, config: Any, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_parameters["rope_theta"]
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.additional_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TextLayer(config, layer, dropout) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing, self.call = False, call

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: list[KeyValue] | None = None,
        cache_only: bool = False,
    ) -> BackboneOutput:
        """
        Args:
            cache_only: the states are not wanted, so what the last layer makes of its keys and values is left out; they
                are empty then.
        """
        rope = self.rope(positions)
        cache, gqa = [], has_gqa_kernel(x)
        for index, layer in enumerate(self.layers):
            before = None if past is None else past[index]
            ends = cache_only and index + 1 == len(self.layers)
            active = self.gradient_checkpointing and self.training
            x, keys, values = checkpointed(self.call, active, layer, x, rope, mask, before, ends, gqa)
            cache.append((keys, values))
        return BackboneOutput(x.new_empty(0) if cache_only else self.norm(x), cache)

    def rope(self, positions: Tensor) -> KeyValue:
        """Cosines and sines of the layers' angles at (B, L): (B, L, 1, head size / 2)."""
        angles = rotary_angles(positions, self.head_dim, self.rope_theta)[:, :, None]
        return angles.cos(), angles.sin()


class Molmo2Body(nn.Module):
    def __init__(self, config: Molmo2Config, dropout: float) -> None:
        super().__init__()
        self.image_patch_id = config.image_patch_id
        self.vision_tower = VisionTower(config.vision_config, config.adapter_config.vision_feature_layer)
        self.multi_modal_projector = ImagePooling(config.adapter_config)
        self.language_model = TextModel(config.text_config, dropout)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        pixels: Tensor,
        pooling: Tensor,
        cache_only: bool = False,
    ) -> BackboneOutput:
        """Run a batch.

        Args:
            ids, pixels, pooling: see `embedded`. positions: (B, L) int64. mask: (B, 1, L, L) bool, True where a query
                (third) sees a key (last).
            cache_only: see `TextModel`.

        Raises:
            DataError: see `check_images`, which whoever captures this as a CUDA graph calls before.
        """
        x = self.embedded(ids, pixels, pooling)
        hidden: BackboneOutput = self.language_model(x, positions, mask, cache_only=cache_only)
        return hidden

    def embedded(self, ids: Tensor, pixels: Tensor, pooling: Tensor) -> Tensor:
        """What text layers are given, (B, L, hidden).

        Args:
            ids: (B, L) int64. pixels: (C, patches, pixels of a patch) uint8. pooling: (P, 4) indices of patches over
                all crops, -1 for none; the P image tokens are those of `ids`, row by row.

        Raises:
            DataError: see `check_images`.
        """
        if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.check_images(ids, pooling)
        x: Tensor = self.language_model.embed_tokens(ids)
        if len(pixels):
            tower = self.vision_tower
            recomputed = tower.gradient_checkpointing and self.training
            features = checkpointed(self.multi_modal_projector, recomputed, tower(normalized(pixels)), pooling)
            x = _with_images(x, ids == self.image_patch_id, features)
        return x

    def check_images(self, ids: Tensor, pooling: Tensor) -> None:
        """
        Raises:
            DataError: `pooling` has another number of image tokens than `ids`, or one without a patch.
        """
        tokens, pools = int((ids == self.image_patch_id).sum()), int((pooling >= 0).any(-1).sum())
        if not tokens == pools == len(pooling):
            raise DataError(
                f"{tokens} image tokens in the text, {len(pooling)} features of images, {pools} of them with a patch",
                code="image_tokens_mismatch",
                where="a batch of the policy",
                remedy="pass input_ids and pooling of the same examples, in the same order",
            )


class Molmo2Backbone(nn.Module):
    """`model` and `lm_head`, as native Molmo2ForConditionalGeneration names them."""

    def __init__(self, config: Molmo2Config, dropout: float) -> None:
        super().__init__()
        self.model = Molmo2Body(config, dropout)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)


def _with_images(x: Tensor, is_patch: Tensor, features: Tensor) -> Tensor:
    """x (B, L, hidden) with `features` added where `is_patch` (B, L), in order; no shape depends on values."""
    order = is_patch.flatten().cumsum(0).sub(1).clamp(min=0)
    added = features.to(x.dtype).index_select(0, order).view_as(x)
    return x + added.masked_fill(~is_patch[..., None], 0.0)


def has_gqa_kernel(x: Tensor) -> bool:
    """Whether attention with a mask has a kernel for grouped heads where `x` is: cuDNN's, which PyTorch asks first on
    these GPUs, in bfloat16. Elsewhere PyTorch would compute it by plain operations, in float32.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in CUDNN_FIRST


def normalized(levels: Tensor) -> Tensor:
    """uint8 levels as float32 in [-1, 1]."""
    return levels.float() / 255.0 * 2.0 - 1.0


def _in_turn(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, None)
    return x


def call(module: Callable[..., Any], *inputs: Any) -> Any:
    """What layers are called by, which `MolmoAct2.compile_layers` compiles."""
    return module(*inputs)


def checkpointed(module: Callable[..., Any], active: bool, *inputs: Any) -> Any:
    """Call `module`; if `active`, its activations are computed again in the backward pass instead of being kept."""
    return checkpoint(module, *inputs, use_reentrant=False) if active else module(*inputs)
