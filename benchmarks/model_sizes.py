"""Sizes of models, as their published config.json have them, for the page of memory and for tests."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from benchmarks.policy_case import RELEASED
from benchmarks.step_case import TEXT, TEXT_7B, VISION, VISION_7B

SMALL_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "deepstack_visual_indexes": [5, 11, 17],
}
TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}


def text_sizes(hidden: int, layers: int, heads: int, kv: int, inner: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


def qwen3_vl(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "text_config": text | {"head_dim": 128, "tie_word_embeddings": tied},
        "vision_config": vision | {"out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": tied,
    }


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
    "Qwen/Qwen2-VL-2B-Instruct": {
        "model_type": "qwen2_vl",
        "text_config": text_sizes(1536, 28, 12, 2, 8960, 151_936),
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4},
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-VL-2B-Instruct": qwen3_vl(text_sizes(2048, 28, 16, 8, 6144, 151_936), SMALL_TOWER, True),
    "Qwen/Qwen3-VL-4B-Instruct": qwen3_vl(text_sizes(2560, 36, 32, 8, 9728, 151_936), SMALL_TOWER, True),
    "Qwen/Qwen3-VL-8B-Instruct": qwen3_vl(text_sizes(4096, 36, 32, 8, 12288, 151_936), TOWER, False),
    "google/gemma-3-4b-it": {
        "model_type": "gemma3",
        "text_config": text_sizes(2560, 34, 8, 4, 10240, 262_208) | {"head_dim": 256},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
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
}


def config_of(source: str) -> PretrainedConfig:
    """Return a configuration with the sizes of the model `source`.

    Raises:
        KeyError: its sizes are not known here.
    """
    sizes = dict(SIZES[source])
    return CONFIG_MAPPING[sizes.pop("model_type")](**sizes)


def policy_config_of(source: str) -> MolmoAct2Config:
    """Return the configuration of the released MolmoAct2 checkpoint `source`.

    Raises:
        KeyError: its sizes are not known here.
    """
    return MolmoAct2Config.from_dict({"allenai/MolmoAct2-LIBERO": RELEASED}[source])
