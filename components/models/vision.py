"""The vision tower on distinct images, and their features where rows show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from components.contracts.errors import ConfigurationError
from components.models.context_parallel import FeatureExchange

Features = Tensor | Sequence[Tensor]


def encoded_images(
    body: Any,
    inputs: Mapping[str, Tensor],
    tokens: Sequence[int],
    shown: Sequence[int],
    exchange: FeatureExchange | None = None,
) -> Any:
    """What the model's body takes as `mm_encoder_outputs["image"]`, with one pass of the vision tower for all images.

    A gradient of an image that is shown several times is their sum.

    Args:
        body: a transformers model with `get_image_features`.
        inputs: those of the distinct images, by name; others are left out.
        tokens: of each distinct image, how many tokens it has.
        shown: which images take the place of tokens, in order.
        exchange: in place of `shown`, where ranks share a sequence: the images are those that this rank encodes.

    Raises:
        ConfigurationError: the features are not one for each token.
    """
    names = signature(body.get_image_features).parameters
    found = body.get_image_features(**{name: inputs[name] for name in names if name in inputs}, return_dict=True)
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
            where="trainer.packing",
            remedy="leave it out: this model's images cannot be told apart",
        )
    if exchange is not None:
        flat = exchange(flat)
    elif list(shown) != list(range(len(tokens))):
        parts = flat.split(list(tokens))
        flat = torch.cat([parts[image] for image in shown])
    return flat if one else (flat,)
