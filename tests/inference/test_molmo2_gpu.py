"""Molmo2 on a GPU, whose server has bidirectional attention inside images. Needs CUDA and vLLM >= 0.26."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from armature.components.inference.client import Completion
from armature.components.inference.pool import ServerPool
from armature.components.inference.replies import Endpoint
from armature.components.inference.settings import EvaluationSamplingSettings, ServerSettings
from tests.builders import make_machine
from tests.images import image_part, noise
from tests.vlm.conftest import model_settings

SAMPLING = EvaluationSamplingSettings(temperature=1.0, max_tokens=8, top_p=1.0, top_k=0)
SETTINGS = ServerSettings(max_model_len=1024, max_images_per_prompt=2, dtype="float32")
MODEL = model_settings()
IMAGES = [noise(0, width=100, height=80), noise(1, width=64, height=150)]
TOLERANCE = 5e-3  # nats per token; Triton multiplies fp32 as tf32


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


FIRST, SECOND = map(image_part, IMAGES)
ASKED = {
    # First, so that vLLM has neither image in its cache and processes both in one call.
    "two side by side": ([{"role": "user", "content": [FIRST, SECOND, text("which?")]}], IMAGES),
    "one image": ([{"role": "user", "content": [text("look "), FIRST, text("here")]}], IMAGES[:1]),
    "two turns": (
        [
            {"role": "user", "content": [FIRST, text("first")]},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [text("second"), SECOND]},
        ],
        IMAGES,
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Two checkpoints with bidirectional attention within images, and a copy of the first one with causal
    attention."""
    from armature.components.models.tiny import make_tiny_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    made = {"old": (0, "bidirectional"), "new": (1, "bidirectional"), "causal": (0, "causal")}
    return {
        name: make_tiny_checkpoint("molmo2", root / name, seed, image_attention=attention)  # type: ignore[arg-type]
        for name, (seed, attention) in made.items()
    }


def differences(folder: Path, answers: dict[str, Completion]) -> dict[str, float]:
    """Return the largest difference between the trainer's and the server's log-probs of each answer, by name. The
    trainer scores the token ids that the server reported."""
    from armature.components.models.load import load_model, load_processor

    model, processor = load_model(folder, MODEL), load_processor(folder, MODEL)
    result = {}
    for name, answer in answers.items():
        messages, images = ASKED[name]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = dict(processor(text=[prompt], images=[images], add_special_tokens=False, return_tensors="pt"))
        assert answer.prompt_token_ids.tolist() == inputs["input_ids"][0].tolist()
        sampled = torch.tensor(answer.token_ids[None].astype(np.int64))
        inputs["input_ids"] = torch.cat([inputs["input_ids"], sampled], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        types = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(sampled)], 1)
        with torch.no_grad():
            logits = model(**inputs).logits[0, -sampled.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, sampled.T)[:, 0].numpy()
        result[name] = float(np.abs(logprobs - answer.logprobs).max())
    return result


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_trainer_and_server_use_bidirectional_image_attention(checkpoints, tmp_path):
    """Before and after weights are sent over CUDA IPC, under the names that the trainer's model has."""
    from armature.components.inference.weights import WEIGHT_SENDERS
    from armature.components.models.load import load_model

    machine = make_machine(
        servers__python=Path(os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python")),
        servers__gpus=((0,),),
        servers__arguments={"gpu_memory_utilization": 0.2, "enforce_eager": True},
        weight_transfer="ipc",
        ready_timeout=300,
    )

    async def publish(endpoints: Sequence[Endpoint]) -> None:
        weights = load_model(checkpoints["new"], MODEL).cuda().state_dict()
        await asyncio.to_thread(lambda: WEIGHT_SENDERS["ipc"](endpoints, 60).send(weights))

    async with ServerPool(checkpoints["old"], SETTINGS, machine, tmp_path / "logs") as pool:

        async def ask() -> dict[str, Completion]:
            return {name: await pool.complete(messages, SAMPLING, 0) for name, (messages, _) in ASKED.items()}

        before = await ask()
        await pool.sync(checkpoints["new"], 1, publish)
        before, after = [before, await ask()]
    old, new = differences(checkpoints["old"], before), differences(checkpoints["new"], after)
    causal = differences(checkpoints["causal"], before)
    print({"old": old, "new": new, "causal": causal})
    assert max((*old.values(), *new.values())) < TOLERANCE
    assert min(causal.values()) > 4 * TOLERANCE
