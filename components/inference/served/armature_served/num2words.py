"""Let vLLM serve SmolVLM2 without the package num2words.

The processor of transformers (5.23) spells numbers of video frames with it, and refuses to be built without it, also to
process images.
"""

from __future__ import annotations

from typing import NoReturn


def make_num2words_optional() -> None:
    """Let a SmolVLM processor be built. Only a video is refused without the package."""
    from transformers.models.smolvlm import processing_smolvlm

    if processing_smolvlm.num2words is None:
        processing_smolvlm.num2words = _refuse_video


def _refuse_video(number: int) -> NoReturn:
    raise ImportError("videos of SmolVLM need the package num2words: pip install num2words")
