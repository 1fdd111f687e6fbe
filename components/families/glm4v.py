"""The families GLM-4.1V and GLM-4.5V, a mixture of experts: positions rotate half of each head, in sections. Images are
cut into patches as in Qwen2-VL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from armature.components.families.family import LANGUAGE, Family, ImageInputs
from armature.components.families.joins import cat
from armature.components.families.tiny import PATCH, TinyRecipe, TinySettings, TinyVocabulary, glm, text_sizes

IMAGE_TOKENS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
)
VOCABULARY = TinyVocabulary(
    markers=(
        *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *IMAGE_TOKENS,
    ),
    pad="<|endoftext|>",
    eos="<|user|>",
    named={"image_token": "<|image|>", "video_token": "<|video|>"},
)
MERGE = 2  # 2 x 2 patches become one token
ROTATED = 0.5  # part of each head that positions rotate
EXPERT_WIDTH = 96


def _text(settings: TinySettings, tokenizer: Any) -> dict[str, Any]:
    frequencies = int(settings.hidden_size // settings.heads * ROTATED) // 2
    spatial = (frequencies - frequencies // 4) // 2
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": ROTATED,
        "mrope_section": [frequencies - 2 * spatial, spatial, spatial],
    }
    return text_sizes(settings, tokenizer) | {"rope_parameters": rope, "attention_bias": True}


def _shared(settings: TinySettings, tokenizer: Any) -> dict[str, Any]:
    names = {
        "image_token_id": "<|image|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_token_id": "<|video|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    vision = {
        "depth": settings.vision_layers,
        "hidden_size": settings.vision_hidden_size,
        "intermediate_size": settings.vision_intermediate_size,
        "num_heads": settings.vision_heads,
        "out_hidden_size": settings.hidden_size,
        "image_size": settings.image_side,
        "patch_size": PATCH,
        "initializer_range": settings.vision_initializer_range,
    }
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}
    return ids | {"vision_config": vision, "tie_word_embeddings": settings.tie_embeddings}


def _config(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Glm4vConfig

    return Glm4vConfig(text_config=_text(settings, tokenizer), **_shared(settings, tokenizer))


def _moe_config(settings: TinySettings, tokenizer: Any) -> Any:
    """The first layer is dense; each other one has 8 experts in two groups and a shared one. Each token uses 2 experts
    of one group."""
    from transformers import Glm4vMoeConfig

    experts = {
        "head_dim": settings.hidden_size // settings.heads,
        "use_qk_norm": False,  # transformers has no such norms, and vLLM asks
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": EXPERT_WIDTH,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    }
    return Glm4vMoeConfig(text_config=_text(settings, tokenizer) | experts, **_shared(settings, tokenizer))


def _prefer(model: Any, settings: TinySettings) -> None:
    """Prefer some experts by the correction bias of routers, which in released models evens out the load."""
    from torch import nn

    for layer in model.model.language_model.layers:
        if hasattr(layer.mlp, "gate"):
            nn.init.uniform_(layer.mlp.gate.e_score_correction_bias, -0.1, 0.1)


def _processor(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    # Pixels of an image count twice, since a patch has two frames.
    size = {"shortest_edge": 2 * (PATCH * MERGE) ** 2, "longest_edge": 2 * settings.image_side**2}
    images, videos = (kind(patch_size=PATCH, size=size) for kind in (Glm4vImageProcessor, Glm4vVideoProcessor))
    return Glm4vProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)


def _initialize(model: Any, settings: TinySettings) -> None:
    """Let each layer add a quarter of a normalized state. With transformers' ones, the normalized outputs of attention
    and MLP would be many times as large as the embeddings of tokens."""
    from torch import nn

    for layer in model.model.language_model.layers:
        nn.init.constant_(layer.post_self_attn_layernorm.weight, 0.25)
        nn.init.constant_(layer.post_mlp_layernorm.weight, 0.25)


GLM4V = Family(
    name="glm4v",
    model_type="glm4v",
    vision=("model.visual",),
    projector=("model.visual.merger", "model.visual.downsample"),
    language=LANGUAGE,
    placeholder="image_token_id",
    image_tokens=IMAGE_TOKENS,
    wrap_classes=("Glm4vTextDecoderLayer", "Glm4vVisionBlock"),
    served_entries={"text_config.attention_bias": True},
    images=ImageInputs(
        feature_token=".image_token",
        joins={"pixel_values": cat, "image_grid_thw": cat},
        type_ids="mm_token_type_ids",
    ),
    tiny=TinyRecipe(VOCABULARY, glm("<|begin_of_image|><|image|><|end_of_image|>"), _config, _processor, _initialize),
)
GLM4V_MOE = replace(
    GLM4V,
    name="glm4v-moe",
    model_type="glm4v_moe",
    wrap_classes=("Glm4vMoeTextDecoderLayer", "Glm4vMoeVisionBlock"),
    served_adapters=(),  # with adapters vLLM (0.32) ends on CPU at the first request
    served_entries={"text_config.use_qk_norm": False, "text_config.tie_word_embeddings": False},
    tiny=TinyRecipe(VOCABULARY, glm("<|begin_of_image|><|image|><|end_of_image|>"), _moe_config, _processor, _prefer),
)
