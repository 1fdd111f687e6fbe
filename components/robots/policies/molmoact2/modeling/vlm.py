"""The vision-language model: parts and names of transformers' Molmo2, but it also returns each layer's keys and values.

The forward pass differs from transformers' in three points, because MolmoAct2's weights were trained so: pixels are
rounded to 8 bits, norms and rotary positions are computed in float32, and text layers have residual dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Molmo2Config
from transformers.models.molmo2.modeling_molmo2 import (
    Molmo2Adapter,
    Molmo2Attention,
    Molmo2DecoderLayer,
    Molmo2VisionMLP,
    Molmo2VisionModel,
)

from armature.components.contracts.errors import DataError
from armature.components.robots.policies.model import call, checkpointed
from armature.components.robots.policies.molmoact2.modeling.layers import RMSNorm, rotary_angles, rotate

KeyValue = tuple[Tensor, Tensor]
CUBLAS_GELU = "gelu_pytorch_tanh"
"""transformers' name of the GELU that `torch._addmm_activation` computes on a GPU; on a CPU it computes another."""
CUDNN_FIRST = (9, 10)
"""Major compute capabilities of GPUs on which PyTorch prefers cuDNN's attention."""


class BackboneOutput(NamedTuple):
    """Output of the language model: its last states, and the keys and values of all layers.

    states: (B, L, hidden) after the last norm.
    cache: keys (normed and rotated) and values of each layer, (B, key-value heads, L, head size) each. If the model
        continued earlier tokens (argument `past`), L counts both earlier and new tokens.

    The class is a tuple because FSDP finds tensors with gradients only in tuples, lists and dicts.
    """

    states: Tensor
    cache: list[KeyValue]


class TextAttention(Molmo2Attention):
    """Grouped-query attention with RMS norms of queries and keys."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, angles: KeyValue, mask: Tensor, past: KeyValue | None, gqa: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention's output, and the keys and values of past and new tokens.

        Args:
            x: New tokens, (B, L, hidden).
            angles: Cosines and sines of the new tokens' rotary angles.
            past: Keys and values of earlier tokens.
            gqa: True if a kernel supports grouped heads; otherwise keys and values are repeated for each head.
        """
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), *angles).transpose(1, 2)
        keys, values = self.keys_values(x, angles)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        groups = self.num_key_value_groups
        heads = [keys, values] if gqa else [each.repeat_interleave(groups, dim=1) for each in (keys, values)]
        attended = functional.scaled_dot_product_attention(queries, heads[0], heads[1], attn_mask=mask, enable_gqa=gqa)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), keys, values

    def keys_values(self, x: Tensor, angles: KeyValue) -> KeyValue:
        """Return keys and values of the tokens `x`, (B, key-value heads, L, head size) each.

        In memory they are ordered (B, L, heads, head size), so that `joined_heads` need not copy them.
        """
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), *angles)
        return keys.transpose(1, 2), self._heads(self.v_proj(x)).transpose(1, 2)

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (-1, self.head_dim))


class TextLayer(Molmo2DecoderLayer):
    """Layer of the language model with residual dropout."""

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
        """Return the layer's output (B, L, hidden), and the keys and the values of past and new tokens.

        With `cache_only`, only keys and values of the new tokens are computed, and `x` is returned as the output.
        """
        normed = self.input_layernorm(x)
        if cache_only:
            return x, *self.self_attn.keys_values(normed, angles)
        attended, keys, values = self.self_attn(normed, angles, mask, past, gqa)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x))), keys, values


class VisionMLP(Molmo2VisionMLP):
    """MLP of the vision tower, with bias and GELU fused into the first matrix product.

    It is fused only in bfloat16 on a GPU without gradients. The fused result is rounded to bfloat16 only once.
    """

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
    """Maps patches (C, patches, pixels) to the concatenated outputs of the layers `features`.

    The result has the shape (C, patches, hidden x layers).
    """

    def __init__(self, config: Any, features: list[int]) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = VisionMLP(config)
        self.features = features
        self.gradient_checkpointing, self.call = False, call

    def forward(self, pixels: Tensor) -> Tensor:
        """Run the layers and return the outputs of the layers `features`, concatenated.

        If gradient checkpointing is on, the layers are checkpointed in pairs.
        """
        x = self.patch_embedding(pixels.to(self.positional_embedding.dtype)) + self.positional_embedding
        outputs, active = {}, self.gradient_checkpointing and self.training
        for layers in self._in_groups(2 if active else 1):
            x = checkpointed(self.call, active, _in_turn, [self.layers[index] for index in layers], x)
            if layers[-1] in self.features:
                outputs[layers[-1]] = x
        return torch.cat([outputs[index] for index in self.features], dim=-1)

    def _in_groups(self, most: int) -> Iterator[list[int]]:
        """Yield the indices of consecutive layers in groups of at most `most`.

        A layer in `features` is the last of its group, because only the output of a whole group is available.
        """
        group: list[int] = []
        for index in range(len(self.layers)):
            group.append(index)
            if len(group) == most or index in self.features or index + 1 == len(self.layers):
                yield group
                group = []


class ImagePooling(Molmo2Adapter):
    """Image pooling and projector, without the data-dependent branches of transformers' adapter."""

    def forward(self, features: Tensor, pooling: Tensor) -> Tensor:
        """Pool features (C, patches, hidden x layers) to image tokens (P, hidden).

        `pooling` (P, 4) holds the patches of each image token, at least one of them not -1.
        """
        valid = pooling >= 0
        patches = features.flatten(0, 1).index_select(0, pooling.clamp(min=0).flatten()).unflatten(0, pooling.shape)
        patches = patches * valid[..., None].to(patches.dtype)
        count = valid.sum(-1)[:, None, None].to(patches.dtype)
        query = patches.sum(-2, keepdim=True) / count
        pooled, _ = self.image_pooling_2d(query, patches, attention_mask=valid[:, None, None, :])
        y: Tensor = self.image_projector(pooled.squeeze(1))
        return y


class TokenEmbedding(nn.Module):
    """Token embedding with separate tables for base and additional vocabulary, because they may be frozen separately.

    The tables are named as in released checkpoints.
    """

    def __init__(self, base: int, additional: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(base, hidden).normal_(std=0.02))
        self.new_embedding = nn.Parameter(torch.empty(additional, hidden).normal_(std=0.02))

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids (B, L) to (B, L, hidden); ids from `base` on index the additional table."""
        base = len(self.embedding)
        is_base = ids < base
        of_base = functional.embedding(ids.clamp(max=base - 1), self.embedding)
        added = functional.embedding((ids - base).clamp(min=0), self.new_embedding)
        return torch.where(is_base[..., None], of_base, added)


class TextModel(nn.Module):
    """The language model without its output head."""

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
        """Run all layers.

        Args:
            x: Embedded tokens, (B, L, hidden).
            positions: (B, L) int64.
            mask: (B, 1, L, L) bool, True where a query (third) attends to a key (last); with `past`, keys count past
                and new tokens.
            past: Keys and values of earlier tokens, for each layer.
            cache_only: Only compute keys and values: most of the last layer is skipped, and the states are empty.
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
        """Return cosines and sines of the rotary angles at positions (B, L), (B, L, 1, head size / 2) each."""
        angles = rotary_angles(positions, self.head_dim, self.rope_theta)[:, :, None]
        return angles.cos(), angles.sin()


class Molmo2Body(nn.Module):
    """Vision tower, image pooling and language model."""

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
        """Run the model on a batch.

        Args:
            ids, pixels, pooling: See `embedded`.
            positions, mask, cache_only: See `TextModel.forward`.

        Raises:
            DataError: see `check_images`. Code that captures this method as a CUDA graph must call it before.
        """
        x = self.embedded(ids, pixels, pooling)
        hidden: BackboneOutput = self.language_model(x, positions, mask, cache_only=cache_only)
        return hidden

    def embedded(self, ids: Tensor, pixels: Tensor, pooling: Tensor) -> Tensor:
        """Return the input of the text layers, (B, L, hidden): token embeddings with image features added.

        Args:
            ids: (B, L) int64.
            pixels: (C, patches, pixels of a patch) uint8.
            pooling: (P, 4) indices of patches, counted over all crops, -1 for no patch. The P image tokens are in the
                order of the image patch tokens in `ids`, row by row.

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
        """Check that `pooling` belongs to the image tokens in `ids`; this waits for the GPU.

        Raises:
            DataError: `pooling` and `ids` have different numbers of image tokens, or an image token has no patch.
        """
        tokens, pools = int((ids == self.image_patch_id).sum()), int((pooling >= 0).any(-1).sum())
        if not tokens == pools == len(pooling):
            raise DataError(
                f"the text has {tokens} image tokens, and pooling has {len(pooling)}, {pools} of them with a patch",
                code="image_tokens_mismatch",
                where="a batch of the policy",
                remedy="pass input_ids and pooling of the same examples, in the same order",
            )


class Molmo2Backbone(nn.Module):
    """The VLM with its output head; `model` and `lm_head` are named as in Molmo2ForConditionalGeneration."""

    def __init__(self, config: Molmo2Config, dropout: float) -> None:
        super().__init__()
        self.model = Molmo2Body(config, dropout)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)


def _with_images(x: Tensor, is_patch: Tensor, features: Tensor) -> Tensor:
    """Add image features (P, hidden) to x (B, L, hidden) at the P tokens where `is_patch` (B, L) is True, in order.

    No shape depends on a tensor's values, so that CUDA graphs can capture this function.
    """
    order = is_patch.flatten().cumsum(0).sub(1).clamp(min=0)
    added = features.to(x.dtype).index_select(0, order).view_as(x)
    return x + added.masked_fill(~is_patch[..., None], 0.0)


def has_gqa_kernel(x: Tensor) -> bool:
    """Return True if masked attention has a kernel for grouped heads on the device and in the dtype of `x`.

    This is cuDNN's kernel, which PyTorch prefers in bfloat16 on GPUs of CUDNN_FIRST. Elsewhere PyTorch would fall
    back to plain operations in float32.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in CUDNN_FIRST


def normalized(levels: Tensor) -> Tensor:
    """Map uint8 levels to float32 in [-1, 1]."""
    return levels.float() / 255.0 * 2.0 - 1.0


def _in_turn(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, None)
    return x
