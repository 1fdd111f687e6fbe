"""What code that comes with a checkpoint lacks of what native classes have."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from transformers import AutoModel, PreTrainedModel, ProcessorMixin

from armature.components.families.family import Family, image_token_ids

MODULES = "transformers_modules"  # the package that transformers puts such code into


def is_remote(thing: object) -> bool:
    """Whether the class of `thing` came with a checkpoint."""
    return type(thing).__module__.partition(".")[0] == MODULES


def register_body(model: PreTrainedModel) -> None:
    """Let `AutoModel.from_config` of the model's configuration give the class of its body, as for native models."""
    if is_remote(model) and is_remote(model.config):
        AutoModel.register(type(model.config), type(model.model), exist_ok=True)


def complete_processor(processor: ProcessorMixin, family: Family) -> None:
    """Give the class of a Molmo2 processor what servers and adapters ask of one, where it lacks it.

    `image_token` and `image_token_id`: the text that stands for one image. `_get_num_multimodal_tokens`: as in
    native processors.
    """
    if family.name != "molmo2":
        return
    kind: Any = type(processor)
    token = getattr(processor, "image_placeholder_token", "<|image|>")
    if not hasattr(processor, "image_token"):
        kind.image_token = property(lambda self: token)
    if not hasattr(processor, "image_token_id"):
        kind.image_token_id = property(lambda self: self.tokenizer.convert_tokens_to_ids(self.image_token))
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        image_ids = image_token_ids(family, processor.tokenizer)

        def count(self: Any, image_sizes: Any = None, **kwargs: Any) -> dict[str, list[int]]:
            return count_image_tokens(self, image_ids, image_sizes or [], **kwargs)

        kind._get_num_multimodal_tokens = count


def count_image_tokens(processor: Any, image_ids: tuple[int, ...], sizes: Any, **kwargs: Any) -> dict[str, list[int]]:
    """`num_image_tokens` and `num_image_patches` (crops) of images of `sizes`, (height, width) each, by trying."""
    counts: dict[str, list[int]] = {"num_image_tokens": [], "num_image_patches": []}
    for height, width in sizes:
        blank = Image.new("RGB", (width, height))
        outputs = processor(images=[blank], text=[processor.image_token], return_tensors="pt", **kwargs)
        marked = torch.isin(outputs["input_ids"], torch.tensor(image_ids))
        counts["num_image_tokens"].append(int(marked.sum()))
        counts["num_image_patches"].append(int(outputs["pixel_values"].shape[0]))
    return counts
