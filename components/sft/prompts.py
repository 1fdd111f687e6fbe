"""Chat messages as the token ids that a model server would return for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from armature.components.artifacts.images import decode
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.rollouts import TokenIds


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, threads that are started compute with one core: an image processor's steps are too small for more,
    and on a busy machine ten times as slow with two.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PromptWriter:
    """The family's chat template and processor, used as vLLM's chat route uses them.

    The tokenizer adds no special tokens of its own: a beginning-of-sequence token comes from the template, or from a
    processor that always writes one, which prompts without images do not pass. Several threads may ask.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._lock = Lock()  # a fast tokenizer refuses to be used by two threads at once

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> TokenIds:
        """(P,) the prompt of the next assistant message, image placeholders expanded."""
        images = [_image(part) for message in messages for part in _parts(message) if _is_image(part)]
        chat = [{**message, "content": [_for_template(part) for part in _parts(message)]} for message in messages]
        with self._lock:
            text = self._processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            if images:
                ids = self._processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0]
            else:
                ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def answer(self, text: str) -> TokenIds:
        """(C,) what a policy samples that says `text` and stops: its tokens and the end-of-sequence token."""
        tokenizer = self._processor.tokenizer
        with self._lock:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.array([*ids, tokenizer.eos_token_id], dtype=np.int32)


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _is_image(part: Mapping[str, Any]) -> bool:
    return part["type"] == "image_url"


def _for_template(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "image"} if _is_image(part) else part


def _image(part: Mapping[str, Any]) -> Image.Image:
    return decode(EncodedImage.from_url(part["image_url"]["url"]))
