"""The adapter that fits a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from armature.components.adapters.collate import SampleCollator
from armature.components.adapters.family import FamilyAdapter
from armature.components.adapters.generic import infer_spec
from armature.components.adapters.images import ImageSource
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.files import read_bytes
from armature.components.contracts.foreign import foreign
from armature.components.families.family import FAMILIES, ImageInputs, family_of
from armature.components.models.source import locate


def get_adapter(
    model: Any,
    processor: Any,
    images: ImageSource | None = None,
    max_tokens: int | None = None,
) -> FamilyAdapter:
    """The adapter for `model`: its configuration, a checkpoint folder or artifact, a family name or a `model_type`.

    `processor` is the model's Hugging Face processor, `images` opens an image by its reference, and `max_tokens`
    bounds the length of a sample (None: unbounded).

    Raises:
        ConfigurationError: as `get_collator` does.
    """
    return FamilyAdapter(get_collator(model, processor), images, max_tokens)


def get_collator(model: Any, processor: Any) -> SampleCollator:
    """The half of `get_adapter` that makes tensors of samples.

    A model that no entry describes gets one inferred from its processor, if that reproduces the processor exactly.

    Raises:
        ConfigurationError: nothing fits; the message says what to write. Or the model expects another
            image token than the processor writes.
    """
    if getattr(processor, "image_processor", None) is None:
        raise ConfigurationError(
            f"{type(processor).__name__} cannot process images",
            code="processor_needed",
            where="the processor",
            remedy="pass the model's processor (AutoProcessor), not its tokenizer",
        )
    config = _config(model)
    collator = SampleCollator(processor, _spec(config, processor))
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
    """The model's configuration; of a name, one that holds nothing but the `model_type`."""
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
    return {"model_type": family.model_type, "vision_config": {"model_type": family.vision_model_type}}


def _spec(config: dict[str, Any], processor: Any) -> ImageInputs:
    name = _name(config)
    if name in FAMILIES and (images := FAMILIES[name].images) is not None:
        spec = replace(images, reserved=FAMILIES[name].image_tokens)
        # vLLM reads this flag too: the model attends causally inside images, so they need no marking.
        return spec if config.get("is_mm_prefix_lm", True) else replace(spec, type_ids=None)
    return infer_spec(processor)


def _name(config: dict[str, Any]) -> str:
    vision = SimpleNamespace(model_type=config.get("vision_config", {}).get("model_type"))
    try:
        return family_of(SimpleNamespace(model_type=config["model_type"], vision_config=vision)).name
    except ConfigurationError:
        return str(config["model_type"])
