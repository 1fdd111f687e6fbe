"""The families Pixtral (LLaVA's architecture with another vision tower) and Mistral3."""

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
    mistral,
    text_sizes,
    vision_sizes,
)

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
    from transformers import MistralConfig, PixtralVisionConfig

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


def _pixtral_config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import LlavaConfig

    return LlavaConfig(**_shared(settings, tokenizer), image_seq_length=1, vision_feature_select_strategy="full")


def _mistral3_config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Mistral3Config

    return Mistral3Config(**_shared(settings, tokenizer), spatial_merge_size=MERGE)


def _processor(merge: int) -> Any:
    def build(settings: TinySettings, tokenizer: Any) -> Any:
        from transformers import PixtralImageProcessor, PixtralProcessor

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


PIXTRAL = Family(
    name="pixtral",
    model_type="llava",
    vision_model_type="pixtral",
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    language=LANGUAGE,
    placeholder="image_token_index",
    image_tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    wrap_classes=("MistralDecoderLayer", "PixtralAttentionLayer"),
    images=ImageInputs(
        feature_token=".image_token",
        joins={"pixel_values": pad_cat, "image_sizes": cat},  # (images, 3, largest H, largest W); sizes before padding
    ),
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _pixtral_config, _processor(1)),
)
MISTRAL3 = replace(
    PIXTRAL,
    name="mistral3",
    model_type="mistral3",
    vision_model_type=None,
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _mistral3_config, _processor(MERGE)),
)
