"""The families Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, the last two also as mixtures of experts: images of any
size, and positions in three dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from armature.components.families.family import COMPONENTS, LANGUAGE, Family, ImageInputs, VideoInputs
from armature.components.families.joins import cat
from armature.components.families.tiny import PATCH, TinyRecipe, TinySettings, TinyVocabulary, chatml, text_sizes

QWEN_IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
EXPERT_WIDTH, SHARED_WIDTH = 96, 160  # unlike the hidden size, so that a wrongly transposed tensor has another shape
MERGE = 2  # 2 x 2 patches become one token
_OF_CLASS = ("model_type", "dtype")
VOCABULARY = TinyVocabulary(
    markers=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *QWEN_IMAGE_TOKENS),
    pad="<|endoftext|>",
    eos="<|im_end|>",
)
_TEXT = "{%- else -%}{{ part['text'] }}"
_VIDEO = "{%- elif part['type'] in ('video', 'video_url') -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
TEMPLATE = chatml("<|vision_start|><|image_pad|><|vision_end|>").replace(_TEXT, _VIDEO + _TEXT)


def _ids(tokenizer: Any) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _config_2(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Qwen2VLConfig

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


def _config_2_5(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig

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


def _config_3(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Qwen3VLConfig

    rope = _mrope(settings) | {"mrope_interleaved": True}
    return Qwen3VLConfig(
        text_config=text_sizes(settings, tokenizer)
        | {"rope_parameters": rope, "head_dim": settings.hidden_size // settings.heads},
        vision_config=_vision_3(settings) | {"deepstack_visual_indexes": [0]},
        tie_word_embeddings=settings.tie_embeddings,
        **_ids(tokenizer),
    )


def _config_3_moe(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Qwen3VLMoeConfig

    # transformers always makes the weights of a token's experts sum to 1. vLLM asks.
    more = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return _with_experts(Qwen3VLMoeConfig, _config_3(settings, tokenizer), more, tokenizer)


def _config_3_5_moe(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Qwen3_5MoeConfig

    more = {"shared_expert_intermediate_size": SHARED_WIDTH}
    return _with_experts(Qwen3_5MoeConfig, _config_3_5(settings, tokenizer), more, tokenizer)


def _with_experts(kind: Any, dense: Any, more: dict[str, Any], tokenizer: Any) -> Any:
    """Return the configuration of class `kind` that has 8 experts, of which each token uses 2, in place of each
    feed-forward layer of `dense`."""
    text = dense.text_config.to_dict() | more
    text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH}
    parts = {"text_config": text, "vision_config": dense.vision_config.to_dict()}
    return kind(
        **{key: {name: part[name] for name in part if name not in _OF_CLASS} for key, part in parts.items()},
        tie_word_embeddings=dense.tie_word_embeddings,
        **_ids(tokenizer),
    )


def _vision_3(settings: TinySettings) -> dict[str, Any]:
    """Return the configuration of the vision tower that Qwen3-VL and Qwen3.5 have in common."""
    return {
        "depth": settings.vision_layers,
        "hidden_size": settings.vision_hidden_size,
        "intermediate_size": settings.vision_intermediate_size,
        "num_heads": settings.vision_heads,
        "out_hidden_size": settings.hidden_size,
        "patch_size": 16,
        "num_position_embeddings": (settings.image_side // 16) ** 2,
        "initializer_range": settings.vision_initializer_range,
    }


def _config_3_5(settings: TinySettings, tokenizer: Any) -> Any:
    """Return a configuration in which, as in the real models, every fourth layer is attention and the others are Gated
    DeltaNet, and a quarter of each attention head is rotated. The last layer is attention, too."""
    from transformers import Qwen3_5Config

    width, last = settings.hidden_size // settings.heads, settings.layers - 1
    kinds = ["full_attention" if n % 4 == 3 or n == last else "linear_attention" for n in range(settings.layers)]
    text = {
        "head_dim": 64,
        "layer_types": kinds,
        "linear_num_key_heads": settings.heads,
        "linear_num_value_heads": 2 * settings.heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    }
    return Qwen3_5Config(
        text_config=text_sizes(settings, tokenizer) | text,
        vision_config=_vision_3(settings),
        tie_word_embeddings=settings.tie_embeddings,
        **_ids(tokenizer),
    )


def _remember(model: Any, settings: TinySettings) -> None:
    """Let Gated DeltaNet layers pass on what they read. With transformers' random weights, most heads forget a token at
    the next one, and the convolution makes their inputs vanish."""
    from torch import nn

    for layer in model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            nn.init.uniform_(layer.linear_attn.A_log, -4.0, -1.0)
            nn.init.normal_(layer.linear_attn.conv1d.weight, std=0.5)


def _mrope(settings: TinySettings) -> dict[str, Any]:
    """Return how many rotary frequencies stand for time, height and width, about 1 : 1.5 : 1.5 as in the real
    models."""
    half = settings.hidden_size // settings.heads // 2
    spatial = (half - half // 4) // 2
    return {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "mrope_section": [half - 2 * spatial, spatial, spatial],
    }


def _processor(kind: str, video: str, patch_size: int, frames: int = 1) -> Callable[[TinySettings, Any], Any]:
    """Return a function that builds a processor of class `kind` with a video processor of class `video`, which limits
    the pixels of so many `frames` together."""

    def build(settings: TinySettings, tokenizer: Any) -> Any:
        import transformers

        least, most = (patch_size * MERGE) ** 2, settings.image_side**2
        sizes = {"patch_size": patch_size, "merge_size": MERGE, "temporal_patch_size": 2}
        colors = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
        images = transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": least, "longest_edge": most}, **sizes, **colors
        )
        videos = getattr(transformers, video)(
            size={"shortest_edge": least, "longest_edge": frames * most}, **sizes, **colors
        )
        return getattr(transformers, kind)(images, tokenizer, videos, chat_template=tokenizer.chat_template)

    return build


VIDEOS = VideoInputs(".video_token", {"pixel_values_videos": "pixel_values", "video_grid_thw": "image_grid_thw"})
_IMAGES = ImageInputs(
    feature_token=".image_token",
    joins={"pixel_values": cat, "image_grid_thw": cat},  # patches of all images; one grid per image
    type_ids="mm_token_type_ids",  # needed for 3-D rotary positions; without them Qwen2.5-VL silently uses 1-D ones
    videos=VIDEOS,
)
QWEN2_VL = Family(
    name="qwen2-vl",
    model_type="qwen2_vl",
    vision=("model.visual",),
    projector=("model.visual.merger",),
    language=LANGUAGE,
    placeholder="image_token_id",
    image_tokens=QWEN_IMAGE_TOKENS,
    wrap_classes=("Qwen2VLDecoderLayer", "Qwen2VLVisionBlock"),
    served_adapters=COMPONENTS,
    whole_tower=True,
    images=_IMAGES,
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _config_2, _processor("Qwen2VLProcessor", "Qwen2VLVideoProcessor", PATCH)),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    name="qwen2.5-vl",
    model_type="qwen2_5_vl",
    wrap_classes=("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"),
    images=replace(_IMAGES, videos=replace(VIDEOS, seconds="second_per_grid_ts")),
    tiny=TinyRecipe(
        VOCABULARY, TEMPLATE, _config_2_5, _processor("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", PATCH)
    ),
)
_PROCESSOR_3 = _processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16, frames=32)
QWEN3_VL = replace(
    QWEN2_VL,
    name="qwen3-vl",
    model_type="qwen3_vl",
    projector=("model.visual.merger", "model.visual.deepstack_merger_list"),
    wrap_classes=("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"),
    embeds_features=False,
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _config_3, _PROCESSOR_3),
)
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    name="qwen3-vl-moe",
    model_type="qwen3_vl_moe",
    wrap_classes=("Qwen3VLMoeTextDecoderLayer", "Qwen3VLMoeVisionBlock"),
    served_adapters=(),  # with adapters vLLM (0.32) ends on CPU at the first request
    served_entries={"text_config.norm_topk_prob": True},
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _config_3_moe, _PROCESSOR_3),
)
QWEN3_5 = replace(
    QWEN2_VL,
    name="qwen3.5",
    model_type="qwen3_5",
    wrap_classes=("Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"),
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _config_3_5, _PROCESSOR_3, _remember),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3.5-moe",
    model_type="qwen3_5_moe",
    wrap_classes=("Qwen3_5MoeDecoderLayer", "Qwen3_5MoeVisionBlock"),
    tiny=TinyRecipe(VOCABULARY, TEMPLATE, _config_3_5_moe, _PROCESSOR_3, _remember),
)
