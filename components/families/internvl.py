"""The families InternVL3 and InternVL3.5: an image is cut into tiles with equal numbers of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from armature.components.families.family import LANGUAGE, Family, ImageInputs
from armature.components.families.joins import cat
from armature.components.families.tiny import (
    PATCH,
    TinyRecipe,
    TinySettings,
    TinyVocabulary,
    chatml,
    text_sizes,
    vision_sizes,
)

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
DOWNSAMPLE = 0.5  # factor of pixel shuffle on each side
MAX_TILES = 4
HEAD = 64  # width of an attention head of Qwen3, which need not be the hidden size divided by the heads


def _tokens_per_tile(settings: TinySettings) -> int:
    return int((settings.image_side // PATCH * DOWNSAMPLE) ** 2)


def _config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import InternVLConfig, InternVLVisionConfig, Qwen2Config

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


def _config_3_5(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Qwen3Config

    config = _config(settings, tokenizer)
    config.text_config = Qwen3Config(**text_sizes(settings, tokenizer), head_dim=HEAD)
    return config


def _processor(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    size = {"height": settings.image_side, "width": settings.image_side}
    return InternVLProcessor(
        GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=MAX_TILES),
        tokenizer,
        InternVLVideoProcessor(size=size),
        image_seq_length=_tokens_per_tile(settings),
        chat_template=tokenizer.chat_template,
    )


INTERNVL = Family(
    name="internvl",
    model_type="internvl",
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    language=LANGUAGE,
    placeholder="image_token_id",
    image_tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    wrap_classes=("Qwen2DecoderLayer", "InternVLVisionLayer"),
    images=ImageInputs(feature_token=".image_token", joins={"pixel_values": cat}),  # tiles of all images
    tiny=TinyRecipe(VOCABULARY, chatml("<IMG_CONTEXT>\n"), _config, _processor),
)
INTERNVL3_5 = replace(
    INTERNVL,
    name="internvl3.5",
    text_model_type="qwen3",
    wrap_classes=("Qwen3DecoderLayer", "InternVLVisionLayer"),
    tiny=TinyRecipe(VOCABULARY, chatml("<IMG_CONTEXT>\n"), _config_3_5, _processor),
)
