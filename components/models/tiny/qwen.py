"""Tiny Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from typing import Any

from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from armature.components.models.families import QWEN_IMAGE_TOKENS
from armature.components.models.settings import TinySettings
from armature.components.models.tiny.recipe import PATCH, TinyRecipe, text_sizes
from armature.components.models.tiny.templates import chatml
from armature.components.models.tiny.tokenizer import TinyVocabulary

MERGE = 2  # 2 x 2 patches become one token
VOCABULARY = TinyVocabulary(
    markers=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *QWEN_IMAGE_TOKENS),
    pad="<|endoftext|>",
    eos="<|im_end|>",
)
TEMPLATE = chatml("<|vision_start|><|image_pad|><|vision_end|>")


def _ids(tokenizer: Any) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _config_2(settings: TinySettings, tokenizer: Any) -> Qwen2VLConfig:
    return Qwen2VLConfig(
        text_config=text_sizes(settings, tokenizer) | {"rope_parameters": _mrope(settings)},
        vision_config={
            "depth": settings.vision_layers,
            "embed_dim": settings.vision_hidden_size,
            "hidden_size": settings.hidden_size,
            "mlp_ratio": settings.vision_intermediate_size // settings.vision_hidden_size,
            "num_heads": settings.vision_heads,
            "patch_size": PATCH,
            "initializer_range": settings.vision_initializer_range,
        },
        tie_word_embeddings=settings.tie_embeddings,
        **_ids(tokenizer),
    )


def _config_2_5(settings: TinySettings, tokenizer: Any) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config=text_sizes(settings, tokenizer) | {"rope_parameters": _mrope(settings)},
        vision_config={
            "depth": settings.vision_layers,
            "hidden_size": settings.vision_hidden_size,
            "intermediate_size": settings.vision_intermediate_size,
            "num_heads": settings.vision_heads,
            "out_hidden_size": settings.hidden_size,
            "patch_size": PATCH,
            "window_size": 56,
            "fullatt_block_indexes": [settings.vision_layers - 1],
            "initializer_range": settings.vision_initializer_range,
        },
        tie_word_embeddings=settings.tie_embeddings,
        **_ids(tokenizer),
    )


def _config_3(settings: TinySettings, tokenizer: Any) -> Qwen3VLConfig:
    rope = _mrope(settings) | {"mrope_interleaved": True}
    return Qwen3VLConfig(
        text_config=text_sizes(settings, tokenizer)
        | {"rope_parameters": rope, "head_dim": settings.hidden_size // settings.heads},
        vision_config={
            "depth": settings.vision_layers,
            "hidden_size": settings.vision_hidden_size,
            "intermediate_size": settings.vision_intermediate_size,
            "num_heads": settings.vision_heads,
            "out_hidden_size": settings.hidden_size,
            "patch_size": 16,
            "num_position_embeddings": (settings.image_side // 16) ** 2,
            "deepstack_visual_indexes": [0],
            "initializer_range": settings.vision_initializer_range,
        },
        tie_word_embeddings=settings.tie_embeddings,
        **_ids(tokenizer),
    )


def _mrope(settings: TinySettings) -> dict[str, Any]:
    """Shares of the rotary frequencies for time, height and width, about 1 : 1.5 : 1.5 as in the real models."""
    half = settings.hidden_size // settings.heads // 2
    spatial = (half - half // 4) // 2
    return {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "mrope_section": [half - 2 * spatial, spatial, spatial],
    }


def _image_processor(settings: TinySettings, patch_size: int) -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(
        patch_size=patch_size,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": (patch_size * MERGE) ** 2, "longest_edge": settings.image_side**2},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def _processor(kind: type, video: type, patch_size: int) -> Any:
    def build(settings: TinySettings, tokenizer: Any) -> Any:
        images = _image_processor(settings, patch_size)
        videos = video(patch_size=patch_size, merge_size=MERGE, temporal_patch_size=2)
        return kind(images, tokenizer, videos, chat_template=tokenizer.chat_template)

    return build


QWEN2_VL = TinyRecipe(VOCABULARY, TEMPLATE, _config_2, _processor(Qwen2VLProcessor, Qwen2VLVideoProcessor, PATCH))
QWEN2_5_VL = TinyRecipe(
    VOCABULARY, TEMPLATE, _config_2_5, _processor(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, PATCH)
)
QWEN3_VL = TinyRecipe(VOCABULARY, TEMPLATE, _config_3, _processor(Qwen3VLProcessor, Qwen3VLVideoProcessor, 16))
