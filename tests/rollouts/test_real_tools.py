"""Tool turns on a real vLLM server: log-probs agree in every turn, and the tokens that were sampled are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from anyio.from_thread import start_blocking_portal

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.batches import Sample
from armature.components.contracts.rollouts import Trajectory
from armature.components.contracts.tool_calls import ToolCall
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings, ServerSettings
from armature.components.inference.tool_calls import ToolFormat
from armature.components.models.adapters import get_adapter
from armature.components.models.adapters.family import model_inputs
from armature.components.models.load import load_model, load_processor
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from armature.components.rl.agreement import compare
from armature.components.rollouts.collect import collect
from armature.components.vlm.logprobs import Policy, predicting
from tests.builders import make_machine
from tests.rollouts.conftest import RecordedEvents
from tests.vlm.conftest import model_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5  # nats per token, both in fp32
BOXES = ([0, 0, 56, 28], [0, 0, 28, 56], [28, 0, 56, 56])
"""Regions of the results. Two of them have as many tokens and other shapes."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Write <tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that renders tools and messages of the role tool, with images."""


class AlwaysCalling(ToolFormat):
    """A format in which any text is a call, so that a model with random weights calls tools."""

    def calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        box = BOXES[sum(text.encode()) % len(BOXES)]
        return [ToolCall("crop", {"image": 0, "box": box}), ToolCall("calculator", {"expression": "6 * 7"})]


class CallingPool:
    """A pool whose model calls tools with any text."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self.tool_format = AlwaysCalling(**pool.tool_format.model_dump())

    async def complete(self, *arguments: Any, **offered: Any) -> Any:
        assert [each["function"]["name"] for each in offered["tools"]] == ["crop", "calculator"]
        return await self._pool.complete(*arguments, **offered)


class Trained:
    """Rollouts on the server, and the samples that the trainer makes of them."""

    def __init__(self, trajectories: Sequence[Trajectory], samples: list[Sample], agreement: Any) -> None:
        self.trajectories, self.samples, self.agreement = trajectories, samples, agreement

    def holding(self, trajectory: Trajectory, index: int) -> list[Sample]:
        """Return the samples in which turn `index` is trained, just as it was sampled."""
        turn = trajectory.turns[index]
        start, ids = len(turn.prompt_token_ids), turn.completion_token_ids
        own = (one for one in self.samples if one.trajectory_id == trajectory.trajectory_id)
        return [
            one
            for one in own
            if np.array_equal(one.input_ids[start : start + len(ids)], ids)
            and one.loss_mask[start : start + len(ids)].all()
        ]


class Setup:
    """A real server, and the trainer's model with the same weights."""

    def __init__(self, checkpoint: Path, pool: ServerPool, portal: Any) -> None:
        self.checkpoint, self.pool, self._portal = checkpoint, pool, portal
        self.processor = load_processor(checkpoint, model_settings())

    def rollouts(self, images: ImageStore, max_tokens: int) -> Trained:
        options = {"args": {"image_size": 56}, "tools": ("crop", "calculator"), "max_tool_calls": 6}
        environment = make_environment(EnvironmentSettings(name="colors", train_tasks=8, heldout_tasks=1, **options), 1)
        sampling = SamplingSettings(max_tokens=max_tokens)
        events, tasks = RecordedEvents(), list(environment.tasks("train"))
        shared: dict[str, Any] = {"step": 0, "seed": 0, "machine": make_machine(), "events": events}

        async def play() -> Any:
            return await collect(environment, tasks, 2, CallingPool(self.pool), images, sampling, **shared)

        try:
            outputs = self._portal.call(play)
        finally:
            environment.close()
        assert not outputs.failures
        adapter = get_adapter(self.checkpoint, self.processor, images.open, 1024)
        samples, drops = adapter.samples(outputs)
        assert not drops
        forbidden = sorted(adapter.collator.forbidden_token_ids)
        model = load_model(self.checkpoint, model_settings())
        policy = Policy(model, logprobs="normal", temperature=1.0, chunk_tokens=1024, forbidden_token_ids=forbidden)
        scores = []
        for sample in samples:
            batch = adapter.collator.collate([sample], images.open)
            with torch.no_grad():
                trained, _ = policy(model_inputs(batch), predicting(batch.loss_mask))
            scores.append(batch.behavior_logprobs[0].masked_scatter(batch.loss_mask[0].bool(), trained).numpy())
        return Trained(outputs.trajectories, samples, compare(samples, scores))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Setup]:
    python = ROOT / ".venv-vllm/bin/python"
    if not python.exists():
        pytest.skip("needs .venv-vllm: make environments")
    folder = tmp_path_factory.mktemp("tools")
    checkpoint = make_tiny_checkpoint("qwen2-vl", folder / "model", 0, SMALL)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    variables = {"PYTHONPATH": str(ROOT / "components/inference/served")}
    machine = make_machine(servers__python=python, threads=1, servers__environment=variables, ready_timeout=400)
    settings = ServerSettings(max_model_len=2048, max_images_per_prompt=4, dtype="float32")
    forbidden = sorted(
        get_adapter(checkpoint, load_processor(checkpoint, model_settings())).collator.forbidden_token_ids
    )
    pool = ServerPool(checkpoint, settings, machine, folder / "logs", forbidden_token_ids=forbidden)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(pool):
        assert (pool.tool_format.renders_tools, pool.tool_format.renders_results) == (True, True)
        yield Setup(checkpoint, pool, portal)


@pytest.mark.parametrize(("max_tokens", "merged"), [(1, True), (16, False)], ids=["one sequence", "other tokens"])
def test_every_turn_agrees_and_is_trained_as_sampled(server, store, max_tokens, merged):
    """A turn of one token is read again as the same token, so the turns of a rollout are one sequence. The text of
    sixteen tokens of random weights is read again as other tokens, so that each turn has a sequence of its own."""
    done = server.rollouts(store, max_tokens)
    tokenizer, changed = server.processor.tokenizer, 0
    for trajectory in done.trajectories:
        assert [len(turn.images) for turn in trajectory.turns] == [1, 2, 3, 4]
        for index, turn in enumerate(trajectory.turns):
            assert len(done.holding(trajectory, index)) == 1
            changed += tokenizer(turn.completion, add_special_tokens=False)["input_ids"] != [
                token for token in turn.completion_token_ids.tolist() if token != tokenizer.eos_token_id
            ]
    turns = [turn for one in done.trajectories for turn in one.turns]
    sampled = sum(len(turn.completion_token_ids) for turn in turns)
    assert done.agreement.tokens == sampled
    assert done.agreement.max_difference < TOLERANCE, done.agreement
    if merged:
        assert len(done.samples) < 2 * len(done.trajectories)
    else:
        assert changed > len(turns) / 2
        assert len(done.samples) > 2 * len(done.trajectories)
