"""vLLM's prompts and log-probs are ours, for every family: one image, two, two turns, and none."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from components.models.families import FAMILIES

PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
SERVABLE = {"gemma3": "gemma3-causal"}  # vLLM's CPU attention is causal inside images
NAMES = [SERVABLE.get(family, family) for family in FAMILIES]
IMAGES = [Image.new("RGB", (100, 80), (200, 30, 30)), Image.new("RGB", (64, 150), (30, 30, 200))]
TOLERANCE = 1e-4  # nats per token, both in fp32
CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}


def _picture(image: Image.Image) -> dict[str, Any]:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    data = base64.b64encode(stream.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _conversations(images: list[Image.Image]) -> list[tuple[list[dict[str, Any]], list[Image.Image]]]:
    first, second = map(_picture, images)
    turns = [
        {"role": "user", "content": [_text("look "), first, _text("here")]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [_text("and "), second, _text("there")]},
    ]
    return [
        (turns[:1], images[:1]),
        ([{"role": "user", "content": [first, _text("or"), second]}], images),
        ([{"role": "system", "content": "Be brief."}, *turns], images),
        ([{"role": "user", "content": "no image"}], []),
    ]


@torch.no_grad()
def _logprobs(model: Any, prompt: dict[str, torch.Tensor], sampled: list[int]) -> list[float]:
    inputs = dict(prompt)
    if not getattr(model.config, "is_mm_prefix_lm", True):
        inputs.pop("token_type_ids")
    more = torch.tensor([sampled])
    inputs["input_ids"] = torch.cat([prompt["input_ids"], more], 1)
    for key, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        if key in prompt:
            inputs[key] = torch.cat([prompt[key], torch.full_like(more, value)], 1)
    logits = model(**inputs).logits[0, -len(sampled) - 1 : -1]
    return logits.log_softmax(-1).gather(1, more.T)[:, 0].tolist()


@pytest.fixture(scope="module")
def served(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM answers, of every family, from one process."""
    folder = tmp_path_factory.mktemp("served")
    conversations = [messages for messages, _ in _conversations(IMAGES)]
    asked = {"folders": {name: str(checkpoint(name)) for name in NAMES}, "conversations": conversations}
    (folder / "asked.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name("vllm_answers.py")
    command = [PYTHON, script, folder / "asked.json", folder / "found.json"]
    run = subprocess.run(command, env=os.environ | CPU, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_log_probs_are_those_of_the_local_model(
    name: str, checkpoint: Callable[[str], Path], served: dict[str, Any]
) -> None:
    processor = AutoProcessor.from_pretrained(checkpoint(name))
    model = AutoModelForImageTextToText.from_pretrained(checkpoint(name), dtype=torch.float32)
    for (messages, shown), answer in zip(_conversations(IMAGES), served[name], strict=True):
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images = [shown] if shown else None
        local = processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
        assert answer["prompt"] == local["input_ids"][0].tolist()
        assert _logprobs(model, local, answer["sampled"]) == pytest.approx(answer["logprobs"], abs=TOLERANCE)
