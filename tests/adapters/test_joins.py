"""Joins against what they imitate."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from transformers import Molmo2ImageProcessor

from armature.components.families.joins import OffsetCat, cat, pad_cat


def test_pad_cat_adds_zeros_at_the_end_of_every_other_dim() -> None:
    small, large = torch.ones(1, 2, 1), torch.full((2, 1, 3), 2.0)
    joined = pad_cat([small, large], [])
    assert joined.tolist() == [[[1, 0, 0], [1, 0, 0]], [[2, 2, 2], [0, 0, 0]], [[2, 2, 2], [0, 0, 0]]]


def test_indices_into_the_batch_are_raised_as_the_molmo2_processor_does() -> None:
    processor = Molmo2ImageProcessor(size={"height": 154, "width": 154}, max_crops=4)
    rng = np.random.default_rng(0)
    images = [
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in ((100, 80), (64, 350), (500, 90))
    ]
    features = [dict(processor(image, return_tensors="pt")) for image in images]
    expected = processor(images, return_tensors="pt")
    index = OffsetCat("pixel_values", dims=2)
    indices = [one["image_token_pooling"] for one in features]
    assert (indices[1] == -1).any() or (indices[0] == -1).any()
    assert torch.equal(index(indices, features), expected["image_token_pooling"])
    assert not torch.equal(cat(indices, features), expected["image_token_pooling"])
    for name in ("pixel_values", "image_grids", "image_num_crops"):
        assert torch.equal(cat([one[name] for one in features], features), expected[name])
