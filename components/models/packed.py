"""A model on rows that lie in one sequence without padding, in which what several of them begin with lies once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.utils.generic import get_max_seqlen
from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids, get_vision_window_index

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.families.family import family_of
from armature.components.models.attention import CAUSAL_LAYERS, attention_blocks
from armature.components.models.context_parallel import (
    ContextParallel,
    FeatureExchange,
    feature_exchange,
    images_encoded_by,
    to_device,
)
from armature.components.models.packed_attention import PACKED, REMEDY, Segments

# The vision tower on distinct images, and their features where rows show them.

Features = Tensor | Sequence[Tensor]
GRID = "image_grid_thw"


def tower_inputs(body: Any, grids: Tensor | None) -> dict[str, Tensor | int]:
    """What the vision tower of a Qwen2-VL or Qwen2.5-VL would derive from `grids` (n, 3), by the name of its argument.

    To derive it from grids on a GPU, a host waits a dozen times for all that the GPU has been given to do; other towers
    still do.
    """
    tower: Any = getattr(body, "visual", None)
    windows = isinstance(tower, Qwen2_5_VisionTransformerPretrainedModel)
    if grids is None or not (windows or isinstance(tower, Qwen2VisionTransformerPretrainedModel)):
        return {}
    config, merge = tower.config, tower.spatial_merge_size
    ends, longest = get_vision_attention_seqlens(grids, config)
    found = {GRID: grids, "position_ids": get_vision_position_ids(grids, merge), "cu_seqlens": ends}
    longest_of = {"max_seqlen": longest}
    if windows:
        order, ends = get_vision_window_index(grids, merge, config.window_size, config.patch_size)
        found |= {"window_index": order, "cu_window_seqlens": ends}
        longest_of["max_window_seqlen"] = get_max_seqlen(ends, config)
    return found | {name: length for name, length in longest_of.items() if length is not None}


def encoded_images(
    body: Any,
    inputs: Mapping[str, Tensor],
    tokens: Sequence[int],
    shown: Sequence[int],
    exchange: FeatureExchange | None = None,
    derived: Mapping[str, Tensor | int] | None = None,
) -> Any:
    """What the model's body takes as `mm_encoder_outputs["image"]`, with one pass of the vision tower for all images.

    A gradient of an image that is shown several times is their sum.

    Args:
        body: a transformers model with `get_image_features`.
        inputs: those of the distinct images, by name; others are left out.
        tokens: of each distinct image, how many tokens it has.
        shown: which images take the place of tokens, in order.
        exchange: in place of `shown`, where ranks share a sequence: the images are those that this rank encodes.
        derived: from `tower_inputs`.

    Raises:
        ConfigurationError: the features are not one for each token.
    """
    names = signature(body.get_image_features).parameters
    given = {name: inputs[name] for name in names if name in inputs} | dict(derived or {})
    found = body.get_image_features(**given, return_dict=True)
    found.pooler_output = _placed(found.pooler_output, tokens, shown, exchange)
    if getattr(found, "deepstack_features", None) is not None:
        found.deepstack_features = [_placed(layer, tokens, shown, exchange) for layer in found.deepstack_features]
    return found


def _placed(
    features: Features, tokens: Sequence[int], shown: Sequence[int], exchange: FeatureExchange | None
) -> Features:
    """Of all images in one tensor, or in a sequence of tensors as `features` are."""
    one = isinstance(features, Tensor)
    flat = features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))
    if len(flat) != sum(tokens):
        raise ConfigurationError(
            f"{len(tokens)} images have {len(flat)} features for {sum(tokens)} tokens",
            code="images_not_separable",
            where="trainer.packing",
            remedy="leave it out: this model's images cannot be told apart",
        )
    if exchange is not None:
        flat = exchange(flat)
    elif list(shown) != list(range(len(tokens))):
        parts = flat.split(list(tokens))
        flat = torch.cat([parts[image] for image in shown])
    return flat if one else (flat,)


Holder = TypeVar("Holder", "Packing", FeatureExchange)
GRIDS = (GRID, "image_grids")
"""Inputs that positions and blocks depend on."""


@dataclass(frozen=True)
class Packing:
    """Where the tokens of B rows of at most L tokens lie in a packed sequence of T tokens in S segments.

    Attributes:
        rows, columns: (T,) int64: from which row, and where in it, a packed token is; others may begin alike.
        places: (B, L) int64: the packed token of each token of a row; 0 at padding.
        lengths: the tokens of each segment, in order.
        keys, key_lengths: see `armature.components.models.packed_attention.Segments`.
        images: the distinct images that the packed tokens show, in order.
        image_tokens: of each distinct image, how many tokens it has.
        encoders: which of the ranks that share the sequence encodes each distinct image.
        positions: (1, T), or (3, 1, T) where the family has positions in three dimensions; from `complete_packing`.
        blocks: see `Segments`; from `complete_packing`.
        exchange: how features reach the ranks that share the sequence; from `complete_packing`.
        image_places: (I,) int64: which packed tokens, of this rank's, stand for images; from `complete_packing`.
        tower: see `armature.components.models.packed.tower_inputs`; from `complete_packing`.
    """

    rows: Tensor
    columns: Tensor
    places: Tensor
    lengths: tuple[int, ...]
    keys: Tensor
    key_lengths: tuple[int, ...]
    images: tuple[int, ...]
    image_tokens: tuple[int, ...]
    encoders: tuple[int, ...]
    positions: Tensor | None = None
    blocks: Tensor | None = None
    exchange: FeatureExchange | None = None
    image_places: Tensor | None = None
    tower: Mapping[str, Tensor | int] = field(default_factory=dict)

    def to(self, device: torch.device) -> Packing:
        """On `device`; grids stay where they are, because a host asks for their numbers."""
        tower = {
            name: to_device(value, device) if isinstance(value, Tensor) and name != GRID else value
            for name, value in self.tower.items()
        }
        exchange = None if self.exchange is None else _tensors_on(self.exchange, device)
        return replace(_tensors_on(self, device), exchange=exchange, tower=tower)


def _tensors_on(value: Holder, device: torch.device) -> Holder:
    tensors = {f.name: own for f in fields(value) if isinstance(own := getattr(value, f.name), Tensor)}
    moved: dict[str, Any] = {name: to_device(own, device) for name, own in tensors.items()}
    return replace(value, **moved)


def use_packed_attention(model: PreTrainedModel, context: ContextParallel | None = None) -> None:
    """Let the language model of `model`, which was loaded with `sdpa`, attend by this module.

    Args:
        context: the ranks that share its packed sequences.

    Raises:
        ConfigurationError: it does something that packed rows cannot have, or its heads cannot be divided among ranks.
    """
    text = model.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ()) - CAUSAL_LAYERS
    if text._attn_implementation not in ("sdpa", PACKED):
        raise ConfigurationError(
            f"packed rows have an attention of their own, and the model was loaded with {text._attn_implementation}",
            code="packing_attention_mismatch",
            where="trainer.packing, model.attn_implementation",
            remedy="leave one of the two out",
        )
    reason = None
    if "mm_encoder_outputs" not in signature(model.model.forward).parameters:
        reason = "its code takes no features of images"
    elif layers:
        reason = f"it has layers of {', '.join(sorted(layers))}"
    elif getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        reason = "its text attends in both directions"
    if reason is not None:
        raise _refusal(model, reason)
    if context is not None:
        context.check_heads(text.num_attention_heads)
    text._attn_implementation = PACKED


def _refusal(model: PreTrainedModel, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"rows of {family_of(model.config).name} cannot be packed: {reason}",
        code="packing_unsupported",
        where=f"trainer.packing, {type(model).__name__}",
        remedy=REMEDY,
    )


def complete_packing(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    grids: Mapping[str, Tensor],
    packing: Packing,
    context: ContextParallel | None = None,
) -> Packing:
    """`packing` with what its tokens have in rows of their own, such as positions. It is work for a CPU.

    Args:
        inputs: the model's for B rows, by name, with those of the distinct images; with `context` of those that this
            rank encodes.
        grids: of the images that the rows show, row after row.

    Raises:
        DataError: rows that begin alike part within tokens that attend to one another, or there are fewer tokens than
            ranks.
    """
    if context is not None and len(packing.rows) < context.size:
        raise DataError(
            f"{context.size} ranks cannot share {len(packing.rows)} tokens",
            code="too_few_tokens",
            where="a micro-batch, machine.trainer_context_parallel",
            remedy="make it smaller",
        )
    at = packing.rows, packing.columns
    body: Any = model.model
    rows = {**inputs, **grids}
    positions = packing.columns[None]
    if GRID in rows and hasattr(body, "get_rope_index"):
        positions = _rope_index(body, rows)[:, *at][:, None]
    blocks = attention_blocks(model.config, rows)
    if blocks is not None:
        _check_blocks(blocks, packing)
    blocks = None if blocks is None else blocks[at]
    exchange = places = None
    if packing.images:
        ids = rows["input_ids"][at]
        places = (ids == getattr(model.config, family_of(model.config).placeholder)).nonzero()[:, 0]
    if context is not None and places is not None:
        exchange = feature_exchange(
            context, packing.images, packing.image_tokens, packing.encoders, places, len(packing.rows)
        )
        own = context.slice(len(packing.rows))
        places = places[(places >= own.start) & (places < own.stop)] - own.start
    tower = tower_inputs(body, inputs.get(GRID))
    return replace(packing, positions=positions, blocks=blocks, exchange=exchange, image_places=places, tower=tower)


def _rope_index(body: Any, rows: Mapping[str, Tensor]) -> Tensor:
    """(3, B, L) positions. Behind the last image of all rows each is one more than that before, so the model, which
    looks at one token at a time, is asked only for the part up to there, and once per distinct beginning.

    As transformers has it, each run of image tokens has one grid.
    """
    types, grids = rows["mm_token_type_ids"], rows["image_grid_thw"]
    asked = int(types.any(0).nonzero().max()) + 2 if types.any() else 1
    begins = {name: rows[name][:, :asked] for name in ("input_ids", "mm_token_type_ids", "attention_mask")}
    shown = (begins["mm_token_type_ids"] != 0).int()
    images = shown.diff(dim=1, prepend=torch.zeros_like(shown[:, :1])).eq(1).sum(1)
    own = grids.split(images.tolist())
    keys = [b"".join(part.numpy().tobytes() for part in each) for each in zip(*begins.values(), own, strict=True)]
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    distinct = [keys.index(key) for key in number]
    found, _ = body.get_rope_index(
        **{name: tokens[distinct] for name, tokens in begins.items()},
        image_grid_thw=torch.cat([own[row] for row in distinct]),
    )
    found = found[:, [number[key] for key in keys]]
    more = torch.arange(1, types.shape[1] - found.shape[-1] + 1)
    return torch.cat([found, found[..., -1:] + more], -1)


def _check_blocks(blocks: Tensor, packing: Packing) -> None:
    numbers = torch.repeat_interleave(torch.arange(len(packing.lengths)), torch.tensor(packing.lengths))
    segment = numbers[packing.places]
    within = (blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)
    cut = within & (segment[:, 1:] != segment[:, :-1])
    if cut.any():
        raise DataError(
            "rows that begin alike part within an image, whose tokens attend to one another",
            code="image_split",
            where=f"row {int(cut.nonzero()[0, 0])} of a micro-batch",
            remedy=REMEDY,
        )


def packed_states(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], packing: Packing, context: ContextParallel | None = None
) -> Tensor:
    """(T, D) last hidden states of the packed tokens; with `context` (t, D), those of this rank.

    Args:
        inputs: `input_ids` (B, L), and those of the distinct images, with `context` of those that this rank encodes.
        packing: from `complete_packing`.

    Raises:
        ConfigurationError: a layer of the model did something else than attend.
    """
    body: Any = model.model
    assert packing.positions is not None
    own, encoded = slice(None), packing.image_tokens
    if context is not None:
        own = context.slice(len(packing.rows))
        encoded = tuple(encoded[image] for image in images_encoded_by(context.rank, packing.encoders, encoded))
    ids = inputs["input_ids"][packing.rows[own], packing.columns[own]][None]
    images, embeddings = {}, None
    if packing.images:
        found = encoded_images(body, inputs, encoded, packing.images, packing.exchange, packing.tower)
        if family_of(model.config).embeds_features:
            embeddings = _embedded(body, ids, found.pooler_output, packing.image_places)
        else:
            images["image"] = found
    segments = Segments(packing.lengths, packing.keys, packing.key_lengths, packing.blocks, context)
    states: Tensor = body(
        input_ids=ids if embeddings is None else None,
        inputs_embeds=embeddings,
        # Four dimensions: transformers takes the mask as it is, and makes none of T x T.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        position_ids=packing.positions[..., own],
        mm_encoder_outputs=images,
        segments=segments,
        use_cache=False,
    ).last_hidden_state
    layers = model.config.get_text_config().num_hidden_layers
    if segments.layers != layers:
        raise _refusal(model, f"{segments.layers} of its {layers} layers attend")
    return states[0]


def _embedded(body: Any, ids: Tensor, features: Tensor | Sequence[Tensor], places: Tensor | None) -> Tensor:
    """(1, T, D): the features of images at their `places`, and embeddings elsewhere.

    transformers finds the places by a mask, and a host waits for a GPU to count them, forward and backward.
    """
    (flat,) = (features,) if isinstance(features, Tensor) else features
    embeddings: Tensor = body.get_input_embeddings()(ids)
    assert places is not None
    return embeddings.index_copy(1, places, flat[None].to(embeddings.dtype))
