"""The family Gemma3: the tokens of an image attend in both directions."""

from __future__ import annotations

from typing import Any

from armature.components.families.family import LANGUAGE, Family, ImageInputs
from armature.components.families.joins import cat
from armature.components.families.tiny import (
    PATCH,
    TinyRecipe,
    TinySettings,
    TinyVocabulary,
    gemma,
    text_sizes,
    vision_sizes,
)

VOCABULARY = TinyVocabulary(
    markers=(
        *("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    ),
    # The processor puts two line breaks around an image; servers expect a run of line breaks to be one token.
    words=("\n", "\n\n", "\n\n\n", "\n\n\n\n"),
    pad="<pad>",
    eos="<end_of_turn>",
    bos="<bos>",
    named={
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
)
POOL = 2  # 2 x 2 patches are averaged to one token
WINDOW = 512


def _tokens_per_image(settings: TinySettings) -> int:
    return (settings.image_side // PATCH // POOL) ** 2


def _config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    head = settings.hidden_size // settings.heads
    text = Gemma3TextConfig(
        **text_sizes(settings, tokenizer),
        head_dim=head,
        query_pre_attn_scalar=head,
        sliding_window=WINDOW,
        layer_types=["full_attention" if index % 2 else "sliding_attention" for index in range(settings.layers)],
    )
    vision = SiglipVisionConfig(
        **vision_sizes(settings),
        image_size=settings.image_side,
        patch_size=PATCH,
        vision_use_head=False,
    )
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=_tokens_per_image(settings),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        initializer_range=settings.initializer_range,
        tie_word_embeddings=settings.tie_embeddings,
    )


def _processor(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    side = settings.image_side
    return Gemma3Processor(
        Gemma3ImageProcessor(size={"height": side, "width": side}),
        tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=_tokens_per_image(settings),
    )


def _initialize(model: Any, settings: TinySettings) -> None:
    """Initialize the projection at random: with Gemma3's zeros, the vision tower would get no gradient."""
    from torch import nn

    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=settings.initializer_range)


GEMMA3 = Family(
    name="gemma3",
    model_type="gemma3",
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    language=LANGUAGE,
    placeholder="image_token_index",
    image_tokens=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    wrap_classes=("Gemma3DecoderLayer", "SiglipEncoderLayer"),
    image_attention=True,
    whole_tower=True,
    embeds_features=False,
    images=ImageInputs(
        feature_token=".tokenizer.image_token",  # the processor's image_token is the start of an image instead
        joins={"pixel_values": cat},
        type_ids="token_type_ids",  # attention is bidirectional inside an image
    ),
    tiny=TinyRecipe(VOCABULARY, gemma("<start_of_image>"), _config, _processor, _initialize),
)
