"""The trainer's answer to a probe, compared with the published checkpoint loaded by transformers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from armature.components.inference.command import vocabulary
from armature.components.inference.probe import LIKELIEST, WORDS, Probe, make_probe
from armature.components.rollouts.batches.table import write_batch
from tests.refusals import refused

from .conftest import LORA, worker_of


@torch.no_grad()
def of_transformers(folder: Path, probe: Probe) -> np.ndarray[Any, Any]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    ids = torch.tensor([probe.tokens])
    text = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": WORDS}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[prompt], images=[[probe.pil_image()]], add_special_tokens=False, return_tensors="pt")
    after = model(**inputs).logits[0, -1].log_softmax(-1)
    return torch.cat([text, after.sort(descending=True).values[:LIKELIEST]]).numpy()


@pytest.mark.parametrize(
    ("family", "tied", "changes", "training"),
    [
        ("qwen3-vl", True, {}, {}),
        ("qwen2-vl", False, {"lora": LORA}, {"logprobs": {"name": "normal"}}),
        ("gemma3", True, {}, {}),
        ("molmo2", False, {}, {}),
    ],
)
def test_probe_answer_equals_published_checkpoint(make_tiny, tmp_path, family, tied, changes, training):
    tiny = make_tiny(family, tied)
    worker = worker_of(tiny, tmp_path / "work", {"learning_rate": 0.01, **training}, **changes)
    assert worker.learner.policy.temperature != 1  # a probe always uses temperature 1
    forbidden = sorted(tiny.collator.forbidden_token_ids)
    probe = make_probe(vocabulary(tiny.folder)[0], forbidden, 511, images=True)

    def ask(**command: Any) -> Any:
        return worker.run(command, worker.check(command))

    before = ask(name="probe", version=0, probe=asdict(probe))
    (tmp_path / "batch").mkdir()
    write_batch(tmp_path / "batch", tiny.samples(4, seed=1))
    ask(name="step", step=1, batch=str(tmp_path / "batch"))
    with refused("version_mismatch", "0"):
        ask(name="probe", version=0, probe=asdict(probe))
    ask(name="publish", version=1, folder=str(tmp_path / "out"))
    after = ask(name="probe", version=1, probe=asdict(probe))
    assert after["dtype"] == "float32"
    assert len(after["logprobs"]) == len(probe.tokens) - 1 + LIKELIEST
    np.testing.assert_allclose(after["logprobs"], of_transformers(tmp_path / "out", probe), atol=1e-5)
    changed = np.abs(np.subtract(after["logprobs"], before["logprobs"]))
    assert (changed > 1e-4).mean() > 0.9  # nearly every value differs between the versions


@pytest.mark.parametrize(("dtype", "autocast"), [("bfloat16", "bf16"), ("float32", "bf16")])
def test_probe_answer_reports_bf16_precision(tiny, tmp_path, dtype, autocast):
    worker = worker_of(tiny, tmp_path, {"autocast": autocast}, dtype=dtype)
    probe = make_probe(200, (), 511, images=True)
    answer = worker.run({"name": "probe", "version": 0, "probe": asdict(probe)}, [])
    assert answer["dtype"] == "bfloat16"
    difference = np.subtract(answer["logprobs"], of_transformers(tiny.folder, probe))
    assert 1e-4 < np.sqrt(np.mean(difference**2)) < 0.03
