"""One image through the family's processor: its features, and the tokens that they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.families.joins import Features

ImageSource = Callable[[ImageRef], Image.Image]

# Kept beside an image's features: lengths (R,) of the consecutive runs of feature tokens in its expansion.
PLACEHOLDER_RUNS = "placeholder_runs"
TEXT_OUTPUTS = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})


def run_lengths(ids: Tensor, token: int) -> Tensor:
    """Lengths (R,) int64 of the maximal runs of `token` in `ids` (L,)."""
    positions = np.flatnonzero(ids.numpy() == token)
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return torch.tensor([len(run) for run in runs if len(run)], dtype=torch.int64)


def process_one(processor: Any, image: Image.Image, feature_token: int) -> dict[str, Tensor]:
    """Everything that the processor makes of one image, and `PLACEHOLDER_RUNS`.

    The whole processor is called, not its image processor alone: it knows options of its own (tiles, patch size)
    and is the only one that knows how many tokens the features need.

    Raises:
        DataError: the processor refuses the image.
    """
    try:
        outputs = processor(images=[image], text=[processor.image_token], return_tensors="pt")
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise DataError(
            f"the image processor cannot use an image of {image.width}x{image.height} pixels: {error}",
            code="image_not_processed",
            where=type(processor).__name__,
            remedy="the sample is dropped and counted; resize such images in the environment",
        ) from error
    features = {name: value for name, value in outputs.items() if name not in TEXT_OUTPUTS}
    features[PLACEHOLDER_RUNS] = run_lengths(outputs["input_ids"][0], feature_token)
    return features


def is_missing(error: Exception) -> bool:
    """Whether an image source failed because it does not have the image, not because the image is bad."""
    return isinstance(error, FileNotFoundError | KeyError) or isinstance(error.__cause__, FileNotFoundError)


def image_features(features: Features) -> dict[str, Tensor]:
    """The features without what is only kept beside them."""
    return {name: value for name, value in features.items() if name != PLACEHOLDER_RUNS}
