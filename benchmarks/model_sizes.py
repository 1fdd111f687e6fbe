"""Sizes of the models that recipes train, as their published config.json have them: all that a plan needs of them."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from benchmarks.step_case import TEXT, TEXT_7B, VISION, VISION_7B

SIZES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": {
        "model_type": "qwen2_5_vl",
        "text_config": TEXT,
        "vision_config": VISION,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        "model_type": "qwen2_5_vl",
        "text_config": TEXT_7B,
        "vision_config": VISION_7B,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-VL-2B-Instruct": {
        "model_type": "qwen3_vl",
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        "tie_word_embeddings": True,
    },
    "llava-hf/llava-1.5-7b-hf": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 32_064},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
    },
    "allenai/Molmo2-4B": {
        "model_type": "molmo2",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "additional_vocab_size": 128,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 25,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
        },
        "adapter_config": {"hidden_size": 1152, "intermediate_size": 9728, "text_hidden_size": 2560},
    },
}


def config_of(source: str) -> PretrainedConfig:
    """The configuration of a model of these sizes.

    Raises:
        KeyError: its sizes are not known here.
    """
    sizes = dict(SIZES[source])
    return CONFIG_MAPPING[sizes.pop("model_type")](**sizes)
