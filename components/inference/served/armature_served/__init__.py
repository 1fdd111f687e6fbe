"""Code that runs inside the vLLM servers that Armature uses: a vLLM plug-in, a worker extension and an ASGI middleware.

The package needs vLLM 0.26 to 0.32 and imports no other package of Armature.
"""

from __future__ import annotations


def register() -> None:
    """Register Molmo2 and patch vLLM. This is the plug-in's entry point; vLLM calls it repeatedly in each process."""
    from vllm import ModelRegistry

    from .experts import pack_experts_again, return_experts_on_cpu
    from .gated_delta import serve_fp32
    from .images import encode_one_by_one
    from .literal_folders import take_folders_literally
    from .num2words import make_num2words_optional
    from .tied_head import share_the_embedding
    from .videos import allow_text_of_videos, read_animated_png

    ModelRegistry.register_model("Molmo2ForConditionalGeneration", "armature_served.molmo2:Molmo2")
    share_the_embedding()
    pack_experts_again()
    return_experts_on_cpu()
    encode_one_by_one()
    take_folders_literally()
    make_num2words_optional()
    serve_fp32()
    read_animated_png()
    allow_text_of_videos()
