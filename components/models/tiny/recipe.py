"""What a family's module provides so that a tiny checkpoint of it can be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from armature.components.models.settings import TinySettings
from armature.components.models.tiny.tokenizer import TinyVocabulary

PATCH = 14  # pixels of a side, of every family but Qwen3-VL


@dataclass(frozen=True)
class TinyRecipe:
    """`config(settings, tokenizer)` and `processor(settings, tokenizer)` build the Hugging Face objects.

    `initialize(model, settings)` replaces initial weights that would leave the model blind.
    """

    vocabulary: TinyVocabulary
    template: str
    config: Callable[[TinySettings, Any], Any]
    processor: Callable[[TinySettings, Any], Any]
    initialize: Callable[[Any, TinySettings], None] = lambda model, settings: None


def vision_sizes(settings: TinySettings) -> dict[str, int]:
    return {
        "hidden_size": settings.vision_hidden_size,
        "intermediate_size": settings.vision_intermediate_size,
        "num_hidden_layers": settings.vision_layers,
        "num_attention_heads": settings.vision_heads,
    }


def text_sizes(settings: TinySettings, tokenizer: Any) -> dict[str, Any]:
    """The entries that every family's language-model configuration shares."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.key_value_heads,
        "max_position_embeddings": settings.max_positions,
        "initializer_range": settings.initializer_range,
        "tie_word_embeddings": settings.tie_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
