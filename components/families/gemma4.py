"""The family Gemma 4: embeddings for each layer, heads of two widths, and layers that reuse the keys of earlier ones.

The tokens of an image attend causally in the small models. In the large ones (`use_bidirectional_attention: "vision"`)
they attend in both directions in layers with a window; these models can be served on a GPU only, and not packed.
"""

from __future__ import annotations

from typing import Any

from armature.components.families.family import LANGUAGE, Family, ImageInputs
from armature.components.families.joins import cat
from armature.components.families.tiny import (
    TinyRecipe,
    TinySettings,
    TinyVocabulary,
    gemma,
    text_sizes,
    vision_sizes,
)

IMAGE_TOKENS = ("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>")
VOCABULARY = TinyVocabulary(
    markers=("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", *IMAGE_TOKENS),
    words=("\n", "\n\n"),
    pad="<pad>",
    eos="<turn|>",
    bos="<bos>",
    named={
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    },
)
TEMPLATE = gemma("<|image|>").replace("<start_of_turn>", "<|turn>").replace("<end_of_turn>", "<turn|>")
PATCH = 16
POOL = 2  # 2 x 2 patches are averaged to one token; 3 x 3 in released models
TOKENS = 70  # of an image at most; the processor allows no smaller number
WINDOW = 512


def _config(settings: TinySettings, tokenizer: Any) -> Any:
    """Each of the settings' layers is two: one with a window, and one without, whose heads are twice as wide. The last
    half of the layers reuses keys and values. The embeddings are tied, whatever the settings say."""
    from transformers import Gemma4Config

    head = settings.hidden_size // settings.heads
    text = text_sizes(settings, tokenizer) | {
        "num_hidden_layers": 2 * settings.layers,
        "layer_types": ["sliding_attention", "full_attention"] * settings.layers,
        "num_kv_shared_layers": settings.layers // 2 * 2,
        "sliding_window": WINDOW,
        "head_dim": head,
        "global_head_dim": 2 * head,
        "vocab_size_per_layer_input": len(tokenizer),
        "hidden_size_per_layer_input": 32,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    vision = vision_sizes(settings) | {
        "num_key_value_heads": settings.vision_heads,
        "head_dim": settings.vision_hidden_size // settings.vision_heads,
        "patch_size": PATCH,
        "pooling_kernel_size": POOL,
        "position_embedding_size": 1024,
        "initializer_range": settings.vision_initializer_range,
        "default_output_length": TOKENS,
    }
    ids = tokenizer.convert_tokens_to_ids
    return Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        boi_token_id=ids("<|image>"),
        eoi_token_id=ids("<image|>"),
        image_token_id=ids("<|image|>"),
        video_token_id=ids("<|video|>"),
        boa_token_id=ids("<|audio>"),
        eoa_token_index=ids("<audio|>"),
        audio_token_id=ids("<|audio|>"),
        tie_word_embeddings=True,
    )


def _processor(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Gemma4AudioFeatureExtractor, Gemma4ImageProcessor, Gemma4Processor, Gemma4VideoProcessor

    sizes = {"max_soft_tokens": TOKENS, "pooling_kernel_size": POOL, "patch_size": PATCH}
    return Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(**sizes),
        tokenizer,
        Gemma4VideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
        image_seq_length=TOKENS,
    )


def _initialize(model: Any, settings: TinySettings) -> None:
    """Initialize norms and scalars of layers with other values than transformers' ones.

    With ones, attention would be far sharper than in trained models, and outputs of layers larger than their inputs.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight") or ".post_" in name:
            parameter.data.fill_(0.25 if "q_norm" in name else 0.1)
    for layer in model.model.language_model.layers:
        layer.layer_scalar.fill_(0.75)


GEMMA4 = Family(
    name="gemma4",
    model_type="gemma4",
    vision=("model.vision_tower", "model.audio_tower"),  # it is never run
    projector=("model.embed_vision", "model.embed_audio"),
    language=LANGUAGE,
    placeholder="image_token_id",
    image_tokens=IMAGE_TOKENS,
    wrap_classes=("Gemma4TextDecoderLayer", "Gemma4VisionEncoderLayer"),
    embeds_features=False,
    served_entries={"vision_config.default_output_length": None},
    images=ImageInputs(
        feature_token=".image_token",
        joins={"pixel_values": cat, "image_position_ids": cat},  # each image is padded to the same number of patches
        type_ids="mm_token_type_ids",
    ),
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _config, _processor, _initialize),
)
