"""Molmo2: an image in crops, whose tokens attend in both directions."""

from __future__ import annotations

from typing import Any

from armature.components.contracts.errors import ConfigurationError
from armature.components.families.family import LANGUAGE, Family, ImageInputs
from armature.components.families.joins import OffsetCat, cat
from armature.components.families.tiny import PATCH, TinyRecipe, TinySettings, TinyVocabulary, chatml, text_sizes

PATCH_TOKENS = (
    *("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<im_end>", "<im_low>"),
    *("<frame_start>", "<frame_end>"),
)
VOCABULARY = TinyVocabulary(
    # vLLM takes a first token with id 0 for none and writes the stop token instead.
    markers=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"),
    pad="<|endoftext|>",
    eos="<|im_end|>",
    bos="<|begin|>",
    inputs_only=(
        *("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>"),
        *("<frame_start>", "<frame_end>", "<|video|>"),
    ),
)
EXTRA_EMBEDDINGS = 16  # rows for the tokens above, and a few that nothing uses, as in released checkpoints
MAX_CROPS = 4
POOL = 2  # 2 x 2 patches become one token


def _config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Molmo2Config

    if settings.tie_embeddings:
        raise ConfigurationError(
            "Molmo2 has more input embeddings than output ones, so they cannot be one matrix",
            code="tied_embeddings_unsupported",
            where="model.tiny.tie_embeddings = true",
            remedy="set it to false",
        )
    side = settings.image_side
    tower: dict[str, Any] = {
        "hidden_size": settings.vision_hidden_size,
        "num_attention_heads": settings.vision_heads,
        "num_key_value_heads": settings.vision_heads,
        "head_dim": settings.vision_hidden_size // settings.vision_heads,
        "initializer_range": settings.vision_initializer_range,
    }
    text = text_sizes(settings, tokenizer) | {
        "vocab_size": len(tokenizer) - len(VOCABULARY.inputs_only),
        "additional_vocab_size": EXTRA_EMBEDDINGS,
        "head_dim": settings.hidden_size // settings.heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    return Molmo2Config(
        text_config=text,
        vision_config=tower
        | {
            "intermediate_size": settings.vision_intermediate_size,
            "num_hidden_layers": settings.vision_layers,
            "image_size": [side, side],
            "patch_size": PATCH,
        },
        adapter_config=tower
        | {
            "vision_feature_layer": [settings.vision_layers - 1, 0],
            "intermediate_size": settings.intermediate_size,
            "text_hidden_size": settings.hidden_size,
        },
        image_start_token_id=tokenizer.convert_tokens_to_ids("<im_start>"),
        low_res_image_start_token_id=tokenizer.convert_tokens_to_ids("<low_res_im_start>"),
        image_end_token_id=tokenizer.convert_tokens_to_ids("<im_end>"),
        image_patch_id=tokenizer.convert_tokens_to_ids("<im_patch>"),
        frame_start_token_id=tokenizer.convert_tokens_to_ids("<frame_start>"),
        frame_end_token_id=tokenizer.convert_tokens_to_ids("<frame_end>"),
        initializer_range=settings.initializer_range,
        tie_word_embeddings=settings.tie_embeddings,
    )


def _processor(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Molmo2ImageProcessor, Molmo2Processor, Molmo2VideoProcessor

    size = {"height": settings.image_side, "width": settings.image_side}
    margin = 1 if settings.image_side >= 4 * PATCH else 0  # patches of a crop that its neighbor has too
    images = Molmo2ImageProcessor(
        size=size, max_crops=MAX_CROPS, overlap_margins=[margin, margin], pooling_size=[POOL, POOL], patch_size=PATCH
    )
    return Molmo2Processor(
        image_processor=images,
        video_processor=Molmo2VideoProcessor(size=size, patch_size=PATCH),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


MOLMO2 = Family(
    name="molmo2",
    model_type="molmo2",
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    language=LANGUAGE,
    placeholder="image_patch_id",
    image_tokens=(*PATCH_TOKENS, "<|image|>", "<|video|>"),
    wrap_classes=("Molmo2DecoderLayer", "Molmo2VisionEncoderLayer"),
    image_attention=True,
    served_adapters=(),
    embeds_features=False,
    images=ImageInputs(
        feature_token="<im_patch>",
        joins={
            "pixel_values": cat,  # (crops of all images, patches, pixels)
            "image_token_pooling": OffsetCat("pixel_values", dims=2),  # each row: the patches that make one token
            "image_grids": cat,
            "image_num_crops": cat,
        },
        type_ids="mm_token_type_ids",  # attention is bidirectional inside an image
        typed_tokens=PATCH_TOKENS,
    ),
    # The processor begins every text with the first token; vLLM only those with images: the template does it for both.
    tiny=TinyRecipe(VOCABULARY, "{{ bos_token }}" + chatml("<|image|>"), _config, _processor),
)
