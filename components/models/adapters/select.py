"""Find the adapter of a model, or infer one for a family that is not described."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign, read_bytes
from armature.components.families.family import FAMILIES, ImageInputs, family_of
from armature.components.families.joins import Features, Join, cat, pad_cat
from armature.components.models.adapters.collate import (
    PLACEHOLDER_RUNS,
    ImageSource,
    SampleCollator,
    image_features,
    process_one,
)
from armature.components.models.adapters.family import FamilyAdapter
from armature.components.models.load import load_processor
from armature.components.models.settings import ModelSettings
from armature.components.models.source import locate

SIZES = ((100, 80), (64, 150), (500, 90), (700, 900))
"""Sizes of trial images (width, height): wide, tall, small and large, so that tiles, grids and padding differ."""
TYPE_IDS = ("mm_token_type_ids", "token_type_ids")
REMEDY = (
    "describe the family in a file (docs/extending.md) that the entry-point group 'armature.families' names, or "
    "subclass MultimodalAdapter"
)


def infer_spec(processor: Any) -> ImageInputs:
    """Infer image inputs that reproduce `processor` exactly on images of several sizes.

    The feature token is the most frequent token of an image's expansion. Every output must be a tensor that is joined
    along dim 0, with or without zero padding of the other dims. Type ids are reproduced if the processor returns them;
    they must mark exactly the feature tokens.

    Raises:
        ConfigurationError: the processor has no placeholder, or its output for several images cannot be reproduced.
    """
    where = type(processor).__name__
    if not isinstance(getattr(processor, "image_token", None), str):
        raise ConfigurationError(
            "the processor does not name its image token (image_token)",
            code="image_token_missing",
            where=where,
            remedy=REMEDY,
        )
    images = [Image.effect_noise(size, 64.0).convert("RGB") for size in SIZES]
    ids = processor(images=images[-1:], text=[processor.image_token], return_tensors="pt")["input_ids"][0]
    token = int(ids.mode().values)
    try:
        features = [process_one(processor, image, token) for image in images]
    except DataError as error:
        raise ConfigurationError(
            f"no adapter can be inferred: {error.what}", code="adapter_not_inferable", where=where, remedy=REMEDY
        ) from error
    if not all(len(one[PLACEHOLDER_RUNS]) for one in features):
        raise ConfigurationError(
            "an image is not expanded into image tokens", code="adapter_not_inferable", where=where, remedy=REMEDY
        )
    together = processor(images=images, text=["".join([processor.image_token] * len(images))], return_tensors="pt")
    return ImageInputs(
        feature_token=processor.tokenizer.convert_ids_to_tokens(token),
        joins={name: _infer_join(name, features, together, where) for name in image_features(features[0])},
        type_ids=_type_ids(together, token, where),
        reserved=_reserved(processor.tokenizer, set(ids.tolist())),
        merge_turns=False,  # attention across images is unknown; one sample per turn is always exact
    )


def _reserved(tokenizer: Any, expansion: set[int]) -> tuple[str, ...]:
    """Return the added tokens of the tokenizer that occur in an image's expansion. Tokens with another use, such as
    padding, are left out."""
    other = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    added = tokenizer.get_added_vocab()
    return tuple(token for token, number in added.items() if number in expansion and token not in other)


def _infer_join(name: str, features: Sequence[Features], together: Any, where: str) -> Join:
    """Return the function that joins the output `name` of single images to the processor's output for several images.
    Raise a ConfigurationError if no function does."""
    parts = [one[name] for one in features]
    if all(isinstance(part, torch.Tensor) and part.ndim for part in parts):
        for join in (cat, pad_cat):
            if _reproduces(join, parts, features, together[name]):
                return join
    raise ConfigurationError(
        f"the processor's {name!r} for several images does not equal the outputs for single images joined along dim 0",
        code="adapter_not_inferable",
        where=where,
        remedy=REMEDY,
    )


def _reproduces(
    join: Join, parts: Sequence[torch.Tensor], features: Sequence[Features], expected: torch.Tensor
) -> bool:
    """Check that `join`, applied to the outputs for single images, gives exactly the processor's output for all of
    them."""
    same_dims = len({part.ndim for part in parts}) == 1
    same_sizes = len({part.shape[1:] for part in parts}) == 1
    return same_dims and (same_sizes or join is pad_cat) and torch.equal(join(parts, features), expected)


def _type_ids(together: Any, token: int, where: str) -> str | None:
    """Return the name of the processor's output with type ids, or None if it has none. Raise a ConfigurationError if
    the type ids mark tokens other than `token`."""
    for name in TYPE_IDS:
        if name in together:
            if not torch.equal(together[name] != 0, together["input_ids"] == token):
                raise ConfigurationError(
                    f"the processor's {name} marks tokens other than the image token",
                    code="adapter_not_inferable",
                    where=where,
                    remedy=REMEDY,
                )
            return name
    return None


def get_adapter(
    model: Any,
    processor: Any = None,
    images: ImageSource | None = None,
    max_tokens: int | None = None,
) -> FamilyAdapter:
    """Return the adapter that turns rollouts of a model family into training samples and batches.

    Args:
        model: a checkpoint folder or artifact, a model configuration, a family name or a `model_type`.
        processor: the model's Hugging Face processor; None loads it from the checkpoint folder `model`.
        images: opens an image by its reference, e.g. `ImageStore(...).open`.
        max_tokens: longest sample in tokens; None for no limit.

    Raises:
        ConfigurationError: no family fits, or the processor takes no images or writes another image token.
        DataError: the processor cannot be loaded.

    Example:
        >>> import tempfile
        >>> from armature.components.models.tiny import make_tiny_checkpoint
        >>> folder = make_tiny_checkpoint("llava", Path(tempfile.mkdtemp()) / "model")
        >>> adapter = get_adapter(folder, images=lambda ref: Image.open(f"images/{ref.sha256}.png"))
        >>> adapter.tokenizer.decode(adapter.collator.image_token_id)
        '<image>'
    """
    processor = processor or load_processor(model, ModelSettings(source=str(model)))
    return FamilyAdapter(get_collator(model, processor), images, max_tokens)


def get_collator(model: Any, processor: Any) -> SampleCollator:
    """Return the collator of a model, which makes tensors of samples.

    For a model of an unknown family, a collator is inferred from its processor if it reproduces the processor exactly.

    Raises:
        ConfigurationError: no family fits and none can be inferred (the message says what to write), or the model
            expects another image token than the processor writes.
    """
    if getattr(processor, "image_processor", None) is None:
        raise ConfigurationError(
            f"{type(processor).__name__} cannot process images",
            code="processor_needed",
            where="the processor",
            remedy="pass the model's processor (AutoProcessor), not its tokenizer",
        )
    config = _config(model)
    tokens_per_second = config.get("vision_config", {}).get("tokens_per_second", 1.0)
    collator = SampleCollator(processor, _spec(config, processor), tokens_per_second)
    expected = config.get("image_token_id", config.get("image_token_index"))
    if expected is not None and expected != collator.image_token_id:
        raise ConfigurationError(
            f"the model replaces token {expected} by image features, the processor writes {collator.image_token_id}",
            code="image_token_mismatch",
            where=str(config["model_type"]),
            remedy="load the processor from the folder of the model",
        )
    return collator


def _config(model: Any) -> dict[str, Any]:
    """Return the model's configuration as a dict. For a family name or `model_type`, the dict has only the
    `model_type`."""
    if not isinstance(model, str | Path):
        return dict(model.to_dict())
    file = (locate(model) if Path(model).is_dir() else Path(model)) / "config.json"
    if file.is_file():
        with foreign("config.json cannot be read", where=str(file)):
            return dict(json.loads(read_bytes(file)))
    if isinstance(model, Path) or "/" in model:
        raise ConfigurationError(
            "there is no config.json",
            code="config_missing",
            where=str(file),
            remedy="name a checkpoint folder, or pass the model's config",
        )
    if model not in FAMILIES:
        return {"model_type": model}
    family = FAMILIES[model]
    parts = {"vision_config": family.vision_model_type, "text_config": family.text_model_type}
    return {"model_type": family.model_type} | {part: {"model_type": kind} for part, kind in parts.items()}


def _spec(config: dict[str, Any], processor: Any) -> ImageInputs:
    """Return the description of the image inputs: from the model's family, or inferred from the processor if the family
    is unknown."""
    name = _name(config)
    if name in FAMILIES and (images := FAMILIES[name].images) is not None:
        spec = replace(images, reserved=FAMILIES[name].image_tokens)
        # vLLM reads this flag, too. If it is False, images attend causally and need no type ids.
        return spec if config.get("is_mm_prefix_lm", True) else replace(spec, type_ids=None)
    return infer_spec(processor)


def _name(config: dict[str, Any]) -> str:
    """Name of the family of a configuration; its `model_type` if the family is unknown."""
    parts = {
        part: SimpleNamespace(model_type=config.get(part, {}).get("model_type"))
        for part in ("vision_config", "text_config")
    }
    try:
        return family_of(SimpleNamespace(model_type=config["model_type"], **parts)).name
    except ConfigurationError:
        return str(config["model_type"])
