"""What runs inside a vLLM server of ours: a plug-in and a middleware. It needs vLLM 0.26 to 0.32, nothing of ours."""

from __future__ import annotations


def register() -> None:
    """The plug-in. vLLM calls it in each of its processes, more than once."""
    from vllm import ModelRegistry

    from .images import encode_one_by_one
    from .literal_folders import take_folders_literally
    from .tied_head import share_the_embedding

    ModelRegistry.register_model("Molmo2ForConditionalGeneration", "armature_served.molmo2:Molmo2")
    share_the_embedding()
    encode_one_by_one()
    take_folders_literally()
