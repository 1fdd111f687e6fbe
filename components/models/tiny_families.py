"""The families of which tiny checkpoints can be made. Torch-free: recipes are validated with it."""

from __future__ import annotations

from components.registry import Registry

TINY_FAMILIES = Registry(
    "tiny model family",
    "armature.tiny_models",
    {
        "qwen2-vl": "components.models.tiny.qwen:QWEN2_VL",
        "qwen2.5-vl": "components.models.tiny.qwen:QWEN2_5_VL",
        "qwen3-vl": "components.models.tiny.qwen:QWEN3_VL",
        "llava": "components.models.tiny.llava:LLAVA",
        "llava-next": "components.models.tiny.llava:LLAVA_NEXT",
        "pixtral": "components.models.tiny.pixtral:PIXTRAL",
        "mistral3": "components.models.tiny.pixtral:MISTRAL3",
        "internvl": "components.models.tiny.internvl:INTERNVL",
        "molmo2": "components.models.tiny.molmo2:MOLMO2",
        "gemma3": "components.models.tiny.gemma3:GEMMA3",
    },
)
