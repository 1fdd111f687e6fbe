"""Make a complete, small checkpoint of a model family from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from armature.components.families.family import tiny_recipe
from armature.components.families.tiny import FormatSettings, TinySettings
from armature.components.models.attention import apply_image_attention, choose_image_attention
from armature.components.models.load import save_checkpoint
from armature.components.models.settings import ImageAttention
from armature.components.models.tiny.format import format_pretraining
from armature.components.models.tiny.tokenizer import train_tokenizer

SMALL = TinySettings(
    vision_layers=2, image_side=112, vocabulary_size=400, initializer_range=0.05, vision_initializer_range=0.05
)
"""Default sizes of tiny checkpoints."""


def make_tiny_checkpoint(
    family: str,
    folder: str | Path,
    seed: int = 0,
    settings: TinySettings | Mapping[str, Any] = SMALL,
    image_attention: ImageAttention | None = None,
) -> Path:
    """Write a small model with random weights, in the layout of released checkpoints, and return its folder.

    Transformers and vLLM load it like any checkpoint of the family. The same arguments give the same bytes on the same
    kind of processor.

    Args:
        family: name of a model family with tiny checkpoints, e.g. "qwen2-vl".
        folder: receives the configuration, fp32 weights, tokenizer, chat template and processor.
        seed: seed of the weights; `settings.seed` is ignored.
        settings: sizes and the answer format to learn, as `TinySettings` or a mapping of its fields.
        image_attention: attention among the tokens of an image, as in `ModelSettings`; None: the family's default.

    Raises:
        ConfigurationError: the family has no tiny checkpoint, or supports only one kind of image attention.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint = make_tiny_checkpoint("qwen2-vl", Path(folder) / "model", seed=3)
        ...     (checkpoint / "model.safetensors").is_file()
        True
    """
    folder, settings = Path(folder), TinySettings.model_validate(settings)
    recipe = tiny_recipe(family)
    tokenizer = train_tokenizer(
        recipe.vocabulary,
        settings.vocabulary_size,
        [*settings.corpus, *_texts(settings.format)],
        recipe.template,
        settings.max_positions,
    )
    processor = recipe.processor(settings, tokenizer)
    config = recipe.config(settings, tokenizer)
    choose_image_attention(config, image_attention)
    with reproducible(seed):
        model = apply_image_attention(AutoModelForImageTextToText.from_config(config, dtype=torch.float32))
        recipe.initialize(model, settings)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        if settings.format is not None:
            format_pretraining(model, processor, settings.format, seed)
    # Save weights under the names in released checkpoints, which vLLM reads. transformers does so for a model that
    # was loaded from such names, but would use module names for a model made from a configuration.
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    save_checkpoint(model, processor, folder)
    return folder


def _texts(settings: FormatSettings | None) -> list[str]:
    """Return the texts that the tokenizer should encode in few tokens: the answers and the texts of the prompts."""
    if settings is None:
        return []
    turns = [turn for script in settings.transcripts for turn in (*script.user, *script.assistant)]
    prompts = [turn.replace("{image}", "").replace("{answer}", "") for turn in turns]
    return [*settings.answers, settings.system, *prompts]


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Seed torch and use one thread during the block. Sums over several threads would depend on the number of
    threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
