"""Prompts with image placeholders expanded as a server does; tests/models/test_serving.py compares with vLLM."""

from __future__ import annotations

import io
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from armature.components.models.adapters import get_collator
from armature.components.models.load import load_processor
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.vlm.sft.demonstrate import PromptWriter
from tests.vlm.conftest import model_settings


def image_part(side: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (side, 56), (side, 9, 9)).save(buffer, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module", params=["qwen2-vl", "gemma3", "molmo2"])
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "model", 0)
    return load_processor(folder, model_settings()), folder


def test_prompt_has_one_begin_token_and_all_placeholders(processor):
    processor, folder = processor
    collator = get_collator(folder, processor)
    shown = [image_part(56), image_part(84)]
    ids = PromptWriter(processor).prompt([{"role": "user", "content": [shown[0], text("or"), shown[1], text("?")]}])
    sizes = [Image.new("RGB", (side, 56)) for side in (56, 84)]
    needed = sum(int(collator.process_image(image)["placeholder_runs"].sum()) for image in sizes)
    assert int((ids == collator.image_token_id).sum()) == needed
    begin = processor.tokenizer.bos_token_id
    if begin is not None and begin in ids:
        assert ids[0] == begin and int((ids == begin).sum()) == 1


def test_later_prompt_extends_earlier_prompt_and_answer(processor):
    processor, _ = processor
    writer = PromptWriter(processor)
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image_part(56), text("What now?")]},
    ]
    first, answer = writer.prompt(chat), writer.answer("go to desk 1")
    assert processor.tokenizer.decode(answer[:-1]) == "go to desk 1" and answer[-1] == processor.tokenizer.eos_token_id
    chat += [{"role": "assistant", "content": "go to desk 1"}, {"role": "user", "content": [text("And now?")]}]
    later = writer.prompt(chat)
    beginning = np.concatenate([first, answer])
    assert np.array_equal(later[: len(beginning)], beginning)


def test_text_prompt_bypasses_image_processor(processor):
    processor, _ = processor
    ids = PromptWriter(processor).prompt([{"role": "user", "content": "no image"}])
    rendered = processor.tokenizer.decode(ids)
    chat = [{"role": "user", "content": [text("no image")]}]
    assert rendered == processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
