"""Tiny InternVL."""

from __future__ import annotations

from typing import Any

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLProcessor,
    InternVLVideoProcessor,
    InternVLVisionConfig,
    Qwen2Config,
)

from armature.components.models.settings import TinySettings
from armature.components.models.tiny.recipe import PATCH, TinyRecipe, text_sizes, vision_sizes
from armature.components.models.tiny.templates import chatml
from armature.components.models.tiny.tokenizer import TinyVocabulary

VOCABULARY = TinyVocabulary(
    markers=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    ),
    pad="<|endoftext|>",
    eos="<|im_end|>",
    named={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
DOWNSAMPLE = 0.5  # of each side, by pixel shuffle
MAX_TILES = 4


def _tokens_per_tile(settings: TinySettings) -> int:
    return int((settings.image_side // PATCH * DOWNSAMPLE) ** 2)


def _config(settings: TinySettings, tokenizer: Any) -> InternVLConfig:
    return InternVLConfig(
        vision_config=InternVLVisionConfig(
            **vision_sizes(settings),
            image_size=[settings.image_side, settings.image_side],
            patch_size=[PATCH, PATCH],
            initializer_range=settings.vision_initializer_range,
        ),
        text_config=Qwen2Config(**text_sizes(settings, tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=_tokens_per_tile(settings),
        downsample_ratio=DOWNSAMPLE,
        tie_word_embeddings=settings.tie_embeddings,
    )


def _processor(settings: TinySettings, tokenizer: Any) -> InternVLProcessor:
    size = {"height": settings.image_side, "width": settings.image_side}
    return InternVLProcessor(
        GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=MAX_TILES),
        tokenizer,
        InternVLVideoProcessor(size=size),
        image_seq_length=_tokens_per_tile(settings),
        chat_template=tokenizer.chat_template,
    )


INTERNVL = TinyRecipe(VOCABULARY, chatml("<IMG_CONTEXT>\n"), _config, _processor)
