"""Run a model on rows packed into one sequence without padding, in which a beginning that several rows share is stored
once.

Distinct images are encoded once, too, however many rows show them.
"""

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
from armature.components.models.attention import CAUSAL_LAYERS, LINEAR, attention_blocks
from armature.components.models.context_parallel import (
    ContextParallel,
    FeatureExchange,
    feature_exchange,
    images_encoded_by,
    to_device,
)
from armature.components.models.packed_attention import PACKED, REMEDY, Segments
from armature.components.models.packed_delta import has_delta_layers, use_packed_delta

# --- Encoding distinct images once ---

Features = Tensor | Sequence[Tensor]
GRID = "image_grid_thw"
"""Name of the model input with the patch grid (time, height, width) of each image, in Qwen models."""


def tower_inputs(body: Any, grids: Tensor | None) -> dict[str, Tensor | int]:
    """Return what the vision tower of a Qwen2-VL or Qwen2.5-VL would derive from the images' grids, by argument name.

    If the tower derived it from `grids` (n, 3) on a GPU, the host would wait for the GPU about a dozen times. For other
    towers nothing is returned, so they still do.
    """
    tower: Any = getattr(body, "visual", None)
    windows = isinstance(tower, Qwen2_5_VisionTransformerPretrainedModel)
    if grids is None or not (windows or isinstance(tower, Qwen2VisionTransformerPretrainedModel)):
        return {}
    config, merge = tower.config, tower.spatial_merge_size
    ends, longest = get_vision_attention_seqlens(grids, config)
    derived = {GRID: grids, "position_ids": get_vision_position_ids(grids, merge), "cu_seqlens": ends}
    longest_of = {"max_seqlen": longest}
    if windows:
        order, ends = get_vision_window_index(grids, merge, config.window_size, config.patch_size)
        derived |= {"window_index": order, "cu_window_seqlens": ends}
        longest_of["max_window_seqlen"] = get_max_seqlen(ends, config)
    return derived | {name: length for name, length in longest_of.items() if length is not None}


def encoded_images(
    body: Any,
    inputs: Mapping[str, Tensor],
    tokens: Sequence[int],
    shown: Sequence[int],
    exchange: FeatureExchange | None = None,
    derived: Mapping[str, Tensor | int] | None = None,
) -> Any:
    """Encode all images in one pass of the vision tower. Return the body's argument `mm_encoder_outputs["image"]`.

    The gradient of an image that is shown several times is the sum over its occurrences.

    Args:
        body: transformers model with `get_image_features`.
        inputs: inputs of the distinct images, by name; other inputs are ignored.
        tokens: number of tokens of each distinct image.
        shown: indices of the distinct images, in the order in which tokens show them.
        exchange: for ranks that share a sequence, used in place of `shown`; the images are then those that this rank
            encodes.
        derived: result of `tower_inputs`.

    Raises:
        ConfigurationError: the number of features is not the number of tokens.
    """
    names = signature(body.get_image_features).parameters
    arguments = {name: inputs[name] for name in names if name in inputs} | dict(derived or {})
    outputs = body.get_image_features(**arguments, return_dict=True)
    outputs.pooler_output = _in_token_order(outputs.pooler_output, tokens, shown, exchange)
    if getattr(outputs, "deepstack_features", None) is not None:
        outputs.deepstack_features = [
            _in_token_order(layer, tokens, shown, exchange) for layer in outputs.deepstack_features
        ]
    return outputs


def _in_token_order(
    features: Features, tokens: Sequence[int], shown: Sequence[int], exchange: FeatureExchange | None
) -> Features:
    """Put image features in the order of the tokens that show them. The result is one tensor if `features` is one, else
    a tuple with one tensor."""
    one = isinstance(features, Tensor)
    flat = features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))
    if len(flat) != sum(tokens):
        raise ConfigurationError(
            f"{len(tokens)} images give {len(flat)} features, but have {sum(tokens)} tokens",
            code="images_not_separable",
            where="trainer.packing",
            remedy="leave it out: features of this model cannot be assigned to images",
        )
    if exchange is not None:
        flat = exchange(flat)
    elif list(shown) != list(range(len(tokens))):
        parts = flat.split(list(tokens))
        flat = torch.cat([parts[image] for image in shown])
    return flat if one else (flat,)


Holder = TypeVar("Holder", "Packing", FeatureExchange)
GRIDS = (GRID, "image_grids")
"""Names of the model inputs that positions and attention blocks depend on."""


@dataclass(frozen=True)
class Packing:
    """Layout of B rows of at most L tokens in a packed sequence of T tokens, which consists of S segments.

    `complete_packing` fills the attributes from `encoders` on.

    Attributes:
        rows, columns: (T,) int64: for each packed token the row and column of one place where it occurs. It occurs in
            more rows if they share a prefix.
        places: (B, L) int64: packed token of each token of a row; 0 at padding.
        lengths: number of tokens of each segment, in order.
        keys, key_lengths, parents: see `armature.components.models.packed_attention.Segments`.
        images: distinct images that the packed tokens show, in order.
        image_tokens: number of tokens of each distinct image.
        encoders: for ranks that share the sequence, the rank that encodes each distinct image.
        positions: (1, T), or (3, 1, T) for families with three-dimensional positions.
        blocks: see `Segments`.
        exchange: how features reach the ranks that share the sequence.
        image_places: (I,) int64: this rank's packed tokens that stand for images.
        tower: result of `tower_inputs`.
    """

    rows: Tensor
    columns: Tensor
    places: Tensor
    lengths: tuple[int, ...]
    keys: Tensor
    key_lengths: tuple[int, ...]
    parents: tuple[int, ...]
    images: tuple[int, ...]
    image_tokens: tuple[int, ...]
    encoders: tuple[int, ...]
    positions: Tensor | None = None
    blocks: Tensor | None = None
    exchange: FeatureExchange | None = None
    image_places: Tensor | None = None
    tower: Mapping[str, Tensor | int] = field(default_factory=dict)

    def to(self, device: torch.device) -> Packing:
        """Copy the tensors to `device`. Grids stay where they are, since the host reads their numbers."""
        tower = {
            name: to_device(value, device) if isinstance(value, Tensor) and name != GRID else value
            for name, value in self.tower.items()
        }
        exchange = None if self.exchange is None else _tensors_on(self.exchange, device)
        return replace(_tensors_on(self, device), exchange=exchange, tower=tower)


def _tensors_on(value: Holder, device: torch.device) -> Holder:
    """Return a copy of a dataclass whose tensor fields are on `device`."""
    values = {each.name: getattr(value, each.name) for each in fields(value)}
    moved: dict[str, Any] = {name: to_device(each, device) for name, each in values.items() if isinstance(each, Tensor)}
    return replace(value, **moved)


def use_packed_attention(model: PreTrainedModel, context: ContextParallel | None = None) -> None:
    """Make the language model of `model`, which was loaded with `sdpa`, use the packed attention.

    Args:
        context: the ranks that share packed sequences.

    Raises:
        ConfigurationError: the model has a feature that packed rows do not support, or its heads cannot be divided
            among the ranks.
    """
    text = model.config.get_text_config()
    supported = CAUSAL_LAYERS if has_delta_layers(model) else CAUSAL_LAYERS - {LINEAR}
    layers = set(getattr(text, "layer_types", None) or ()) - supported
    if text._attn_implementation not in ("sdpa", PACKED):
        raise ConfigurationError(
            f"packed rows need their own attention, but the model was loaded with {text._attn_implementation}",
            code="packing_attention_mismatch",
            where="trainer.packing, model.attn_implementation",
            remedy="leave one of the two out",
        )
    reason = None
    if "mm_encoder_outputs" not in signature(model.model.forward).parameters:
        reason = "its code does not accept precomputed image features"
    elif layers:
        reason = f"it has layers of type {', '.join(sorted(layers))}"
    elif getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        reason = "its text attends in both directions"
    if reason is not None:
        raise _packing_error(model, reason)
    if context is not None:
        context.check_heads(text.num_attention_heads)
        _check_no_state(model, context)
    text._attn_implementation = PACKED
    use_packed_delta(model)


def _check_no_state(model: PreTrainedModel, context: ContextParallel) -> None:
    """Raise a ConfigurationError if a model has layers with a recurrent state, which ranks cannot share."""
    if has_delta_layers(model):
        raise ConfigurationError(
            f"{context.size} ranks cannot share sequences of {family_of(model.config).name}: its linear attention "
            "passes a state from token to token",
            code="state_not_shared",
            where=f"machine.trainer.context_parallel = {context.size}",
            remedy="leave it out",
        )


def _packing_error(model: PreTrainedModel, reason: str) -> ConfigurationError:
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
    """Add to a packing what depends on the tokens' own rows, such as positions and attention blocks. This is work for a
    CPU.

    Args:
        inputs: the model's inputs for B rows, by name, with the inputs of the distinct images; with `context`, of the
            images that this rank encodes.
        grids: grids of the images that the rows show, row after row.

    Raises:
        DataError: a shared beginning ends within tokens that attend to one another, or there are fewer tokens than
            ranks.
    """
    if context is not None and len(packing.rows) < context.size:
        raise DataError(
            f"{context.size} ranks cannot share only {len(packing.rows)} tokens",
            code="too_few_tokens",
            where="a micro-batch, machine.trainer.context_parallel",
            remedy="use fewer ranks",
        )
    at = packing.rows, packing.columns
    body: Any = model.model
    rows = {**inputs, **grids}
    positions = packing.columns[None]
    if "position_ids" in rows:  # of a batch with a video
        positions = rows["position_ids"][:, *at][:, None]
    elif GRID in rows and hasattr(body, "get_rope_index"):
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
        part = context.slice(len(packing.rows))
        places = places[(places >= part.start) & (places < part.stop)] - part.start
    tower = tower_inputs(body, inputs.get(GRID))
    return replace(packing, positions=positions, blocks=blocks, exchange=exchange, image_places=places, tower=tower)


def _rope_index(body: Any, rows: Mapping[str, Tensor]) -> Tensor:
    """Positions of the rows' tokens, (3, B, L).

    After the last image of all rows, positions increase by one per token. The model's own function loops over tokens,
    so it is called only for the columns up to there, and once per distinct beginning. As in transformers, each run of
    image tokens has one grid.
    """
    types, grids = rows["mm_token_type_ids"], rows["image_grid_thw"]
    columns = int(types.any(0).nonzero().max()) + 2 if types.any() else 1
    begins = {name: rows[name][:, :columns] for name in ("input_ids", "mm_token_type_ids", "attention_mask")}
    shown = (begins["mm_token_type_ids"] != 0).int()
    images = shown.diff(dim=1, prepend=torch.zeros_like(shown[:, :1])).eq(1).sum(1)
    row_grids = grids.split(images.tolist())
    keys = [b"".join(part.numpy().tobytes() for part in each) for each in zip(*begins.values(), row_grids, strict=True)]
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    distinct = [keys.index(key) for key in number]
    positions, _ = body.get_rope_index(
        **{name: tokens[distinct] for name, tokens in begins.items()},
        image_grid_thw=torch.cat([row_grids[row] for row in distinct]),
    )
    positions = positions[:, [number[key] for key in keys]]
    more = torch.arange(1, types.shape[1] - positions.shape[-1] + 1)
    return torch.cat([positions, positions[..., -1:] + more], -1)


def _check_blocks(blocks: Tensor, packing: Packing) -> None:
    """Raise a DataError if a segment ends within a block of tokens that attend to one another."""
    numbers = torch.repeat_interleave(torch.arange(len(packing.lengths)), torch.tensor(packing.lengths))
    segment = numbers[packing.places]
    within = (blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)
    cut = within & (segment[:, 1:] != segment[:, :-1])
    if cut.any():
        raise DataError(
            "the shared beginning of rows ends within an image, whose tokens attend to one another",
            code="image_split",
            where=f"row {int(cut.nonzero()[0, 0])} of a micro-batch",
            remedy=REMEDY,
        )


def packed_states(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], packing: Packing, context: ContextParallel | None = None
) -> Tensor:
    """Return the last hidden states of the packed tokens, (T, D).

    If ranks share the sequence (`context`), the result has only the states of this rank's tokens, (t, D).

    Args:
        inputs: `input_ids` (B, L) and the inputs of the distinct images; with `context`, of the images that this rank
            encodes.
        packing: result of `complete_packing`.

    Raises:
        ConfigurationError: a layer of the model did not use the packed attention.
    """
    body: Any = model.model
    assert packing.positions is not None
    part, encoded = slice(None), packing.image_tokens
    if context is not None:
        part = context.slice(len(packing.rows))
        encoded = tuple(encoded[image] for image in images_encoded_by(context.rank, packing.encoders, encoded))
    ids = inputs["input_ids"][packing.rows[part], packing.columns[part]][None]
    images, embeddings = {}, None
    if packing.images:
        outputs = encoded_images(body, inputs, encoded, packing.images, packing.exchange, packing.tower)
        if family_of(model.config).embeds_features:
            embeddings = _input_embeddings(body, ids, outputs.pooler_output, packing.image_places)
        else:
            images["image"] = outputs
    segments = Segments(packing.lengths, packing.keys, packing.key_lengths, packing.blocks, context, packing.parents)
    states: Tensor = body(
        input_ids=ids if embeddings is None else None,
        inputs_embeds=embeddings,
        # transformers uses a mask of four dimensions as it is, and otherwise would make one of T x T.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        position_ids=packing.positions[..., part],
        mm_encoder_outputs=images,
        segments=segments,
        use_cache=False,
    ).last_hidden_state
    layers = model.config.get_text_config().num_hidden_layers
    if segments.layers != layers:
        raise _packing_error(model, f"only {segments.layers} of its {layers} layers use the packed attention")
    return states[0]


def _input_embeddings(body: Any, ids: Tensor, features: Tensor | Sequence[Tensor], places: Tensor | None) -> Tensor:
    """Input embeddings (1, T, D) with image features at `places`.

    transformers finds the places by a mask, for which the host waits for the GPU in the forward and the backward pass.
    """
    (flat,) = (features,) if isinstance(features, Tensor) else features
    embeddings: Tensor = body.get_input_embeddings()(ids)
    assert places is not None
    return embeddings.index_copy(1, places, flat[None].to(embeddings.dtype))
