"""The families of which tiny checkpoints can be made. Torch-free: recipes are validated with it."""

from __future__ import annotations

from armature.components.registry import Registry

TINY_FAMILIES = Registry(
    "tiny model family",
    "armature.tiny_models",
    {
        "qwen2-vl": "armature.components.models.tiny.qwen:QWEN2_VL",
        "qwen2.5-vl": "armature.components.models.tiny.qwen:QWEN2_5_VL",
        "qwen3-vl": "armature.components.models.tiny.qwen:QWEN3_VL",
        "llava": "armature.components.models.tiny.llava:LLAVA",
        "llava-next": "armature.components.models.tiny.llava:LLAVA_NEXT",
        "pixtral": "armature.components.models.tiny.pixtral:PIXTRAL",
        "mistral3": "armature.components.models.tiny.pixtral:MISTRAL3",
        "internvl": "armature.components.models.tiny.internvl:INTERNVL",
        "molmo2": "armature.components.models.tiny.molmo2:MOLMO2",
        "gemma3": "armature.components.models.tiny.gemma3:GEMMA3",
    },
)
