"""Tiny Pixtral (the LLaVA architecture with Pixtral's tower) and Mistral3."""

from __future__ import annotations

from typing import Any

from transformers import (
    LlavaConfig,
    Mistral3Config,
    MistralConfig,
    PixtralImageProcessor,
    PixtralProcessor,
    PixtralVisionConfig,
)

from armature.components.models.settings import TinySettings
from armature.components.models.tiny.recipe import PATCH, TinyRecipe, text_sizes, vision_sizes
from armature.components.models.tiny.templates import mistral
from armature.components.models.tiny.tokenizer import TinyVocabulary

VOCABULARY = TinyVocabulary(
    markers=(
        *("<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    pad="<pad>",
    eos="</s>",
    bos="<s>",
)
TEMPLATE = mistral("[IMG]")
MERGE = 2  # Mistral3 makes one token of 2 x 2 patches


def _shared(settings: TinySettings, tokenizer: Any) -> dict[str, Any]:
    vision = PixtralVisionConfig(
        **vision_sizes(settings),
        image_size=settings.image_side,
        patch_size=PATCH,
        initializer_range=settings.vision_initializer_range,
    )
    head = settings.hidden_size // settings.heads
    return {
        "vision_config": vision,
        "text_config": MistralConfig(**text_sizes(settings, tokenizer), head_dim=head, sliding_window=None),
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
        "tie_word_embeddings": settings.tie_embeddings,
        "vision_feature_layer": -1,
    }


def _pixtral_config(settings: TinySettings, tokenizer: Any) -> LlavaConfig:
    return LlavaConfig(**_shared(settings, tokenizer), image_seq_length=1, vision_feature_select_strategy="full")


def _mistral3_config(settings: TinySettings, tokenizer: Any) -> Mistral3Config:
    return Mistral3Config(**_shared(settings, tokenizer), spatial_merge_size=MERGE)


def _processor(merge: int) -> Any:
    def build(settings: TinySettings, tokenizer: Any) -> PixtralProcessor:
        images = PixtralImageProcessor(
            size={"longest_edge": settings.image_side}, patch_size={"height": PATCH, "width": PATCH}
        )
        return PixtralProcessor(
            images,
            tokenizer,
            patch_size=PATCH,
            spatial_merge_size=merge,
            chat_template=tokenizer.chat_template,
        )

    return build


PIXTRAL = TinyRecipe(VOCABULARY, TEMPLATE, _pixtral_config, _processor(1))
MISTRAL3 = TinyRecipe(VOCABULARY, TEMPLATE, _mistral3_config, _processor(MERGE))
