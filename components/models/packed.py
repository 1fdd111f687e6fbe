"""A model on rows that lie in one sequence without padding, in which what several of them begin with lies once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.contracts.errors import ConfigurationError, DataError
from components.models.attention import blocks_of
from components.models.families import family_of
from components.models.packed_attention import PACKED, REMEDY, Segments
from components.models.vision import encoded_images

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Packing:
    """Where the tokens of B rows of at most L tokens lie in a packed sequence of T tokens in S segments.

    Attributes:
        rows, columns: (T,) int64: from which row, and where in it, a packed token is; others may begin alike.
        places: (B, L) int64: the packed token of each token of a row; 0 at padding.
        lengths: the tokens of each segment, in order.
        keys, key_lengths: see `components.models.packed_attention.Segments`.
        images: the distinct images that the packed tokens show, in order.
        row_images: those that the rows show, row after row.
        image_tokens: of each distinct image, how many tokens it has.
        positions: (1, T), or (3, 1, T) where the family has positions in three dimensions; from `laid_out`.
        blocks: see `Segments`; from `laid_out`.
    """

    rows: Tensor
    columns: Tensor
    places: Tensor
    lengths: tuple[int, ...]
    keys: Tensor
    key_lengths: tuple[int, ...]
    images: tuple[int, ...]
    row_images: tuple[int, ...]
    image_tokens: tuple[int, ...]
    positions: Tensor | None = None
    blocks: Tensor | None = None

    def to(self, device: torch.device) -> Packing:
        tensors: dict[str, Any] = {
            f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})


def attend_in_segments(model: PreTrainedModel) -> None:
    """Let the language model of `model`, which was loaded with `sdpa`, attend by this module.

    Raises:
        ConfigurationError: it does something that packed rows cannot have; says what.
    """
    text = model.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS
    if text._attn_implementation not in ("sdpa", PACKED):
        raise ConfigurationError(
            f"packed rows have an attention of their own, and the model was loaded with {text._attn_implementation}",
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
    text._attn_implementation = PACKED


def _refusal(model: PreTrainedModel, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"rows of {family_of(model.config).name} cannot be packed: {reason}",
        where=f"trainer.packing, {type(model).__name__}",
        remedy=REMEDY,
    )


def laid_out(model: PreTrainedModel, inputs: Mapping[str, Tensor], packing: Packing) -> Packing:
    """`packing` with the positions and blocks that its tokens have in rows of their own.

    `inputs` are the model's, by name: of B rows, and of the distinct images. It is work for a CPU.

    Raises:
        DataError: rows that begin alike part within tokens that attend to one another.
    """
    shown = torch.tensor(packing.row_images, dtype=torch.int64)
    grids = {name: inputs[name][shown] for name in ("image_grid_thw", "image_grids") if name in inputs}
    rows = {**inputs, **grids}
    at = packing.rows, packing.columns
    body: Any = model.model
    positions = packing.columns[None]
    if "image_grid_thw" in rows and hasattr(body, "get_rope_index"):
        known = ("input_ids", "image_grid_thw", "mm_token_type_ids", "attention_mask")
        found, _ = body.get_rope_index(**{name: rows[name] for name in known})
        positions = found[:, *at][:, None]
    blocks = blocks_of(model.config, rows)
    if blocks is not None:
        _check_blocks(blocks, packing)
    return replace(packing, positions=positions, blocks=None if blocks is None else blocks[at])


def _check_blocks(blocks: Tensor, packing: Packing) -> None:
    numbers = torch.repeat_interleave(torch.arange(len(packing.lengths)), torch.tensor(packing.lengths))
    segment = numbers[packing.places]
    within = (blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)
    cut = within & (segment[:, 1:] != segment[:, :-1])
    if cut.any():
        raise DataError(
            "rows that begin alike part within an image, whose tokens attend to one another",
            where=f"row {int(cut.nonzero()[0, 0])} of a micro-batch",
            remedy=REMEDY,
        )


def packed_states(model: PreTrainedModel, inputs: Mapping[str, Tensor], packing: Packing) -> Tensor:
    """(T, D) last hidden states of the packed tokens.

    Args:
        inputs: `input_ids` (B, L), and those of the distinct images.
        packing: from `laid_out`.

    Raises:
        ConfigurationError: a layer of the model did something else than attend.
    """
    body: Any = model.model
    ids = inputs["input_ids"][packing.rows, packing.columns][None]
    images = {}
    if packing.images:
        images["image"] = encoded_images(body, inputs, packing.image_tokens, packing.images)
    segments = Segments(packing.lengths, packing.keys, packing.key_lengths, packing.blocks)
    states: Tensor = body(
        input_ids=ids,
        # Four dimensions: transformers takes the mask as it is, and makes none of T x T.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        position_ids=packing.positions,
        mm_encoder_outputs=images,
        segments=segments,
        use_cache=False,
    ).last_hidden_state
    layers = model.config.get_text_config().num_hidden_layers
    if segments.layers != layers:
        raise _refusal(model, f"{segments.layers} of its {layers} layers attend")
    return states[0]
