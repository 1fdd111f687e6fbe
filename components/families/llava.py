"""The families LLaVA-1.5 and LLaVA-NeXT; the latter encodes an image as a whole and in tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from armature.components.families.family import LANGUAGE, Family, ImageInputs
from armature.components.families.joins import cat, pad_cat
from armature.components.families.tiny import (
    PATCH,
    TinyRecipe,
    TinySettings,
    TinyVocabulary,
    text_sizes,
    vicuna,
    vision_sizes,
)

VOCABULARY = TinyVocabulary(
    markers=("<unk>", "<s>", "</s>", "<pad>", "<image>"),
    pad="<pad>",
    eos="</s>",
    bos="<s>",
    named={"image_token": "<image>"},
)
TEMPLATE = vicuna("<image>\n")
CLASS_TOKENS = 1  # class token of CLIP, which the feature strategy "default" drops


def _shared(settings: TinySettings, tokenizer: Any) -> dict[str, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig

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


def _config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import LlavaConfig

    return LlavaConfig(**_shared(settings, tokenizer))


def _next_config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import LlavaNextConfig

    return LlavaNextConfig(**_shared(settings, tokenizer), image_grid_pinpoints=_pinpoints(settings))


def _sizes(settings: TinySettings) -> dict[str, Any]:
    side = settings.image_side
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}


def _processor(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    return LlavaProcessor(
        CLIPImageProcessor(**_sizes(settings)),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=CLASS_TOKENS,
        chat_template=tokenizer.chat_template,
    )


def _next_processor(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    return LlavaNextProcessor(
        LlavaNextImageProcessor(**_sizes(settings), image_grid_pinpoints=_pinpoints(settings)),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=CLASS_TOKENS,
        chat_template=tokenizer.chat_template,
    )


LLAVA = Family(
    name="llava",
    model_type="llava",
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    language=LANGUAGE,
    placeholder="image_token_index",
    image_tokens=("<image>",),
    wrap_classes=("LlamaDecoderLayer", "CLIPEncoderLayer"),
    images=ImageInputs(feature_token=".image_token", joins={"pixel_values": cat}),  # one per image
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _config, _processor),
)
LLAVA_NEXT = replace(
    LLAVA,
    name="llava-next",
    model_type="llava_next",
    projector=("model.multi_modal_projector", "model.image_newline"),
    images=ImageInputs(
        feature_token=".image_token",
        joins={"pixel_values": pad_cat, "image_sizes": cat},  # (images, most tiles, 3, H, W); original sizes
    ),
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _next_config, _next_processor),
)
