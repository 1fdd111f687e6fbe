"""Tiny LLaVA-1.5 and LLaVA-NeXT."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
)

from armature.components.models.settings import TinySettings
from armature.components.models.tiny.recipe import PATCH, TinyRecipe, text_sizes, vision_sizes
from armature.components.models.tiny.templates import vicuna
from armature.components.models.tiny.tokenizer import TinyVocabulary

VOCABULARY = TinyVocabulary(
    markers=("<unk>", "<s>", "</s>", "<pad>", "<image>"),
    pad="<pad>",
    eos="</s>",
    bos="<s>",
    named={"image_token": "<image>"},
)
TEMPLATE = vicuna("<image>\n")
CLASS_TOKENS = 1  # CLIP's; the feature strategy "default" drops it again


def _shared(settings: TinySettings, tokenizer: Any) -> dict[str, Any]:
    vision = CLIPVisionConfig(
        **vision_sizes(settings),
        image_size=settings.image_side,
        patch_size=PATCH,
        projection_dim=settings.hidden_size,
        initializer_range=settings.vision_initializer_range,
    )
    return {
        "vision_config": vision,
        "text_config": LlamaConfig(**text_sizes(settings, tokenizer)),
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "image_seq_length": (settings.image_side // PATCH) ** 2,
        "tie_word_embeddings": settings.tie_embeddings,
    }


def _pinpoints(settings: TinySettings) -> list[list[int]]:
    side = settings.image_side
    return [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]


def _config(settings: TinySettings, tokenizer: Any) -> LlavaConfig:
    return LlavaConfig(**_shared(settings, tokenizer))


def _next_config(settings: TinySettings, tokenizer: Any) -> LlavaNextConfig:
    return LlavaNextConfig(**_shared(settings, tokenizer), image_grid_pinpoints=_pinpoints(settings))


def _sizes(settings: TinySettings) -> dict[str, Any]:
    side = settings.image_side
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}


def _processor(settings: TinySettings, tokenizer: Any) -> LlavaProcessor:
    return LlavaProcessor(
        CLIPImageProcessor(**_sizes(settings)),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=CLASS_TOKENS,
        chat_template=tokenizer.chat_template,
    )


def _next_processor(settings: TinySettings, tokenizer: Any) -> LlavaNextProcessor:
    return LlavaNextProcessor(
        LlavaNextImageProcessor(**_sizes(settings), image_grid_pinpoints=_pinpoints(settings)),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=CLASS_TOKENS,
        chat_template=tokenizer.chat_template,
    )


LLAVA = TinyRecipe(VOCABULARY, TEMPLATE, _config, _processor)
LLAVA_NEXT = TinyRecipe(VOCABULARY, TEMPLATE, _next_config, _next_processor)
