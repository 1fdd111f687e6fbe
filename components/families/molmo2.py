"""The family Molmo2: an image is cut into crops, and its tokens attend in both directions."""

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
    # The first token must not have id 0: vLLM would treat it as missing and write the stop token instead.
    markers=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"),
    pad="<|endoftext|>",
    eos="<|im_end|>",
    bos="<|begin|>",
    inputs_only=(
        *("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>"),
        *("<frame_start>", "<frame_end>", "<|video|>"),
    ),
)
EXTRA_EMBEDDINGS = 16  # rows for the tokens above and some unused ones, as in released checkpoints
MAX_CROPS = 4
POOL = 2  # 2 x 2 patches become one token


def _config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Molmo2Config

    if settings.tie_embeddings:
        raise ConfigurationError(
            "Molmo2 has more input than output embeddings, so one matrix cannot serve as both",
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
    margin = 1 if settings.image_side >= 4 * PATCH else 0  # patches that neighboring crops share
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
            "image_token_pooling": OffsetCat("pixel_values", dims=2),  # each row has the patches of one token
            "image_grids": cat,
            "image_num_crops": cat,
        },
        type_ids="mm_token_type_ids",  # attention is bidirectional inside an image
        typed_tokens=PATCH_TOKENS,
    ),
    # The processor adds the first token to every text, vLLM only to those with images; so the template adds it.
    tiny=TinyRecipe(VOCABULARY, "{{ bos_token }}" + chatml("<|image|>"), _config, _processor),
)
