"""Conversion between Molmo2's two weight layouts: transformers' module names (native) and the names in released
checkpoints (hub).

Files use the hub layout: vLLM reads it, and transformers converts it on loading. When transformers itself writes that
layout, it splits the embedding into equal halves; the parts must have `vocab_size` and `additional_vocab_size` rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from armature.components.contracts.errors import DataError

EMBEDDING = "model.language_model.embed_tokens.weight"
EMBEDDING_PARTS = ("model.transformer.wte.embedding", "model.transformer.wte.new_embedding")

_TEXT, _BLOCK = "model.language_model.layers.{}", "model.transformer.blocks.{}"
_TOWER, _VIT = "model.vision_tower", "model.vision_backbone.image_vit"
_PROJECTOR, _BACKBONE = "model.multi_modal_projector", "model.vision_backbone"
_RENAMED = {
    "lm_head": "lm_head",
    "model.language_model.norm": "model.transformer.ln_f",
    f"{_TEXT}.input_layernorm": f"{_BLOCK}.attn_norm",
    f"{_TEXT}.post_attention_layernorm": f"{_BLOCK}.ff_norm",
    f"{_TEXT}.self_attn.o_proj": f"{_BLOCK}.self_attn.attn_out",
    f"{_TEXT}.self_attn.q_norm": f"{_BLOCK}.self_attn.q_norm",
    f"{_TEXT}.self_attn.k_norm": f"{_BLOCK}.self_attn.k_norm",
    f"{_TEXT}.mlp.down_proj": f"{_BLOCK}.mlp.ff_out",
    f"{_TOWER}.positional_embedding": f"{_VIT}.positional_embedding",
    f"{_TOWER}.patch_embedding": f"{_VIT}.patch_embedding",
    f"{_TOWER}.layers.{{}}.self_attn.q_proj": f"{_VIT}.transformer.resblocks.{{}}.attention.wq",
    f"{_TOWER}.layers.{{}}.self_attn.k_proj": f"{_VIT}.transformer.resblocks.{{}}.attention.wk",
    f"{_TOWER}.layers.{{}}.self_attn.v_proj": f"{_VIT}.transformer.resblocks.{{}}.attention.wv",
    f"{_TOWER}.layers.{{}}.self_attn.o_proj": f"{_VIT}.transformer.resblocks.{{}}.attention.wo",
    f"{_TOWER}.layers.{{}}.mlp.fc1": f"{_VIT}.transformer.resblocks.{{}}.feed_forward.w1",
    f"{_TOWER}.layers.{{}}.mlp.fc2": f"{_VIT}.transformer.resblocks.{{}}.feed_forward.w2",
    f"{_TOWER}.layers.{{}}.layer_norm1": f"{_VIT}.transformer.resblocks.{{}}.attention_norm",
    f"{_TOWER}.layers.{{}}.layer_norm2": f"{_VIT}.transformer.resblocks.{{}}.ffn_norm",
    f"{_PROJECTOR}.image_pooling_2d.q_proj": f"{_BACKBONE}.image_pooling_2d.wq",
    f"{_PROJECTOR}.image_pooling_2d.k_proj": f"{_BACKBONE}.image_pooling_2d.wk",
    f"{_PROJECTOR}.image_pooling_2d.v_proj": f"{_BACKBONE}.image_pooling_2d.wv",
    f"{_PROJECTOR}.image_pooling_2d.o_proj": f"{_BACKBONE}.image_pooling_2d.wo",
    f"{_PROJECTOR}.image_projector.gate_proj": f"{_BACKBONE}.image_projector.w1",
    f"{_PROJECTOR}.image_projector.down_proj": f"{_BACKBONE}.image_projector.w2",
    f"{_PROJECTOR}.image_projector.up_proj": f"{_BACKBONE}.image_projector.w3",
}
_RESTORED = {hub: native for native, hub in _RENAMED.items()}
# Hub tensors that hold several native ones along dim 0, in this order.
_FUSED = {
    f"{_BLOCK}.self_attn.att_proj": tuple(f"{_TEXT}.self_attn.{one}_proj" for one in "qkv"),
    f"{_BLOCK}.mlp.ff_proj": (f"{_TEXT}.mlp.up_proj", f"{_TEXT}.mlp.gate_proj"),
}
_PART_OF = {part: whole for whole, parts in _FUSED.items() for part in parts}


def to_hub(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Convert native weights to hub names. All parts of a fused or split tensor must be given.

    Args:
        config: native configuration of the whole model.

    Raises:
        DataError: a name is not Molmo2's, or a fused tensor lacks a part.
    """
    hub: dict[str, Tensor] = {}
    for name, tensor in state.items():
        key, layer, kind = _parse(name)
        if name == EMBEDDING:
            rows = config.text_config.vocab_size
            hub |= dict(zip(EMBEDDING_PARTS, (tensor[:rows], tensor[rows:]), strict=True))
        elif key in _PART_OF:
            whole = _PART_OF[key]
            if key == _FUSED[whole][0]:  # at its first part, add the fused tensor once
                parts = [state.get(part.format(layer) + kind) for part in _FUSED[whole]]
                if any(part is None for part in parts):
                    raise _unknown(whole.format(layer) + kind, "a part of it is missing")
                hub[whole.format(layer) + kind] = torch.cat([part for part in parts if part is not None])
        elif key in _RENAMED:
            hub[_RENAMED[key].format(layer) + kind] = tensor
        else:
            raise _unknown(name, "no such weight in a native Molmo2")
    return hub


def from_hub(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Convert hub weights to native names; the inverse of `to_hub`.

    Raises:
        DataError: a name is not Molmo2's, or one part of the embedding is missing.
    """
    native: dict[str, Tensor] = {}
    for name, tensor in state.items():
        key, layer, kind = _parse(name)
        if name in EMBEDDING_PARTS:
            if not state.keys() >= set(EMBEDDING_PARTS):
                raise _unknown(name, "the other part of the embedding is missing")
            native[EMBEDDING] = torch.cat([state[part] for part in EMBEDDING_PARTS])
        elif key in _FUSED:
            for part, rows in zip(_FUSED[key], tensor.split(_rows(key, config.text_config)), strict=True):
                native[part.format(layer) + kind] = rows
        elif key in _RESTORED:
            native[_RESTORED[key].format(layer) + kind] = tensor
        else:
            raise _unknown(name, "no such weight in a released Molmo2")
    return native


def has_hub_layout(config: Any) -> bool:
    """True for Molmo2, whose files use other names than transformers' modules."""
    return bool(config.model_type == "molmo2")


def _parse(name: str) -> tuple[str, str, str]:
    """Split a weight's name into three parts: the name with {} in place of the layer number, the layer number, and
    .weight or .bias. A missing part is empty."""
    stem, kind = re.fullmatch(r"(.*?)(\.weight|\.bias)?", name).groups(default="")  # type: ignore[union-attr]
    layer = re.search(r"(?<=\.)\d+(?=\.)", stem)
    if layer is None:
        return stem, "", kind
    return stem[: layer.start()] + "{}" + stem[layer.end() :], layer[0], kind


def _rows(fused: str, text: Any) -> list[int]:
    """Return the number of rows of each tensor that is part of a fused tensor, in order."""
    if fused.endswith("ff_proj"):
        return [text.intermediate_size] * 2
    queries, keys = (heads * text.head_dim for heads in (text.num_attention_heads, text.num_key_value_heads))
    return [queries, keys, keys]


def _unknown(name: str, why: str) -> DataError:
    return DataError(
        f"the weights cannot be converted to the other layout: {why}",
        code="weights_layout_mismatch",
        where=name,
        remedy="pass all weights of a Molmo2, with adapters merged, in one of its two layouts",
    )
