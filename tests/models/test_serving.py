"""vLLM serves every tiny checkpoint, with one image, with two, and in a second turn."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from components.models.families import FAMILIES

PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
READY_SECONDS = 280
SERVABLE = {"gemma3": "gemma3-causal"}  # vLLM's CPU attention is causal inside images


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@contextmanager
def _serve(folder: Path, log: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--model", str(folder), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    arguments += ["--dtype", "float32", "--max-model-len", "2048", "--limit-mm-per-prompt", '{"image": 4}']
    arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(server, f"http://127.0.0.1:{port}/v1/models", log)
            yield f"http://127.0.0.1:{port}/v1/chat/completions"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, _errors(log)
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"not ready in {READY_SECONDS} s\n{_errors(log)}")


def _errors(log: Path) -> str:
    return "\n".join(line for line in log.read_text().splitlines() if "ERROR" in line)[:8000]


def _picture(image: Image.Image) -> dict[str, Any]:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    data = base64.b64encode(stream.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


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


@pytest.mark.slow
@pytest.mark.parametrize("family", [SERVABLE.get(family, family) for family in FAMILIES])
def test_prompts_and_log_probs_are_those_of_the_local_model(
    family: str, checkpoint: Callable[[str], Path], images: list[Image.Image], tmp_path: Path
) -> None:
    folder = checkpoint(family)
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    first, second = map(_picture, images)
    turns = [
        {"role": "user", "content": [_text("look "), first, _text("here")]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [_text("and "), second, _text("there")]},
    ]
    conversations = [
        (turns[:1], images[:1]),
        ([{"role": "user", "content": [first, _text("or"), second]}], images),
        ([{"role": "system", "content": "Be brief."}, *turns], images),
        ([{"role": "user", "content": "no image"}], []),
    ]
    with _serve(folder, tmp_path / "server.log") as url:
        for messages, shown in conversations:
            answer = _post(
                url,
                {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 1.0, "logprobs": True}
                | {"return_token_ids": True, "skip_special_tokens": False, "seed": 0},
            )
            text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            local = processor(
                text=[text], images=[shown] if shown else None, add_special_tokens=False, return_tensors="pt"
            )
            assert answer["prompt_token_ids"] == local["input_ids"][0].tolist()
            sampled = answer["choices"][0]["token_ids"]
            served = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
            assert _logprobs(model, local, sampled) == pytest.approx(served, abs=5e-3)
