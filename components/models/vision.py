"""The vision tower on distinct images, and their features where rows show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.utils.generic import get_max_seqlen
from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids, get_vision_window_index

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.context_parallel import FeatureExchange

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
