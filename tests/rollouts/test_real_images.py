"""Images in every mode, orientation and format from an environment to a real vLLM server and to the trainer's model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from armature.components.contracts.episodes import Observation, Outcome, Split, Task
from armature.components.inference.settings import ServerSettings
from armature.components.models.adapters import get_adapter
from armature.components.models.adapters.family import model_inputs
from armature.components.models.load import load_model, load_processor
from armature.components.rl.agreement import compare
from armature.components.rollouts.collect import collect
from armature.components.vlm.logprobs import Policy, predicting
from tests.builders import make_machine
from tests.images import every_image
from tests.vlm.conftest import model_settings

from .conftest import SAMPLING

TOLERANCE = 1e-5  # nats per token, both in fp32


class Gallery:
    """An environment with two turns per task and one image of `tests.images` in each turn."""

    name = "gallery"
    system_prompt = None
    dialogue = True
    max_turns = 2
    reward_weights: ClassVar[dict[str, float]] = {}

    def tasks(self, split: Split) -> Iterator[Task]:
        names = list(every_image())
        for first, second in zip(names, [*names[7:], *names[:7]], strict=True):
            yield Task(first, split, {"images": [first, second]})

    def episode(self, task: Task) -> Visit:
        return Visit(task.payload["images"])

    def close(self) -> None:
        pass


class Visit:
    def __init__(self, names: list[str]) -> None:
        self.shown = [Observation((every_image()[name], "What is this?")) for name in names]

    async def reset(self) -> Observation:
        return self.shown.pop(0)

    async def step(self, action: str) -> Outcome:
        return Outcome(self.shown.pop(0) if self.shown else None)

    async def close(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_trainer_and_server_see_the_same_images(tmp_path, store, events, shared_server, joined_url):
    from armature.components.inference.pool import ServerPool

    checkpoint = shared_server.checkpoint
    machine = make_machine(endpoints=(joined_url,), ready_timeout=400)
    server = ServerSettings(max_model_len=1024, max_images_per_prompt=2, dtype="float32")
    environment = Gallery()
    tasks = list(environment.tasks("train"))

    adapter = get_adapter(checkpoint, load_processor(checkpoint, model_settings()), store.open, 1024)
    pool = ServerPool(
        checkpoint, server, machine, tmp_path / "logs", forbidden_token_ids=sorted(adapter.collator.forbidden_token_ids)
    )
    async with pool:
        outputs = await collect(
            environment, tasks, 1, pool, store, SAMPLING, step=0, seed=0, machine=machine, events=events
        )
    assert not outputs.failures
    policy = Policy(
        load_model(checkpoint, model_settings()),
        logprobs="normal",
        temperature=1.0,
        chunk_tokens=1024,
        forbidden_token_ids=sorted(adapter.collator.forbidden_token_ids),
    )
    samples, drops = adapter.samples(outputs)
    assert not drops
    shown = {ref for sample in samples for ref in sample.images}
    scores = []
    for sample in samples:
        batch = adapter.collator.collate([sample], store.open)
        with torch.no_grad():
            trained, _ = policy(model_inputs(batch), predicting(batch.loss_mask))
        scores.append(batch.behavior_logprobs[0].masked_scatter(batch.loss_mask[0].bool(), trained).numpy())
    agreement = compare(samples, scores)
    assert len(shown) > 50 and agreement.tokens > 10 * len(samples)
    assert agreement.max_difference < TOLERANCE, agreement
