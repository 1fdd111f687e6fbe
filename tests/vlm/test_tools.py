"""Training on rollouts with tools: calls are trained as sampled, results never, and packing changes neither."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from armature.components.contracts.batches import Sample
from armature.components.contracts.episodes import Task
from armature.components.environments.dot import Dot, DotSettings
from armature.components.environments.tools.box import ToolBox
from armature.components.environments.tools.standard import crop, rotate
from armature.components.models.adapters import get_adapter
from armature.components.vlm.sft.demonstrate import PromptWriter, demonstrate
from tests.builders import make_machine

from .conftest import Tiny, assert_same_step, learner_of, stepped
from .test_packing import assert_rows_are_separate

SIDE = 84


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FIRST, OTHER = call("crop", box=[0, 0, 56, 28]), call("crop", box=[0, 0, 28, 56])  # as many tokens of other shape
TURNED = call("rotate", degrees=90) + call("crop", image=0, box=[0, 0, 56, 56])
SCRIPTS = [[FIRST, TURNED], [FIRST, TURNED], [FIRST, TURNED.replace("90", "45")], [OTHER, TURNED], [FIRST], []]
"""The calls of each rollout, before it answers."""


class Looking(Dot):
    """The environment `dot` with tools, and demonstrations that call them."""

    def demonstration(self, task: Task) -> list[str]:
        return [*SCRIPTS[int(task.task_id[-5:])], task.payload["color"]]


@pytest.fixture
def environment() -> Iterator[Looking]:
    made = Looking(
        DotSettings(image_size=SIDE, dot=(4, 4)), train_tasks=len(SCRIPTS), heldout_tasks=0, seed=0, processes=1
    )
    made.tools = ToolBox(functions=[crop, rotate])  # type: ignore[attr-defined]
    yield made
    made.tools.close()  # type: ignore[attr-defined]


def rollouts(tiny: Tiny, environment: Looking) -> list[Sample]:
    """Return the samples of one rollout a script. They show the same first image."""
    tasks = [replace(task, payload={"color": "red", "seed": 0}) for task in environment.tasks("train")]
    writer = PromptWriter(tiny.processor)
    played = demonstrate(environment, tasks, 1.0, writer, tiny.images, make_machine(), lambda done: None)
    outputs = asyncio.run(played)
    assert not outputs.failures
    samples, drops = get_adapter(tiny.folder, tiny.processor, tiny.images.open).samples(outputs)
    assert not drops
    rng = np.random.default_rng(0)
    return [
        replace(
            one,
            behavior_logprobs=np.where(one.loss_mask, rng.normal(-6, 0.3, len(one.input_ids)), 0).astype(np.float32),
            advantages=np.where(one.loss_mask, rng.normal(), 0).astype(np.float32),
        )
        for one in samples
    ]


def test_calls_are_trained_and_their_results_are_context(tiny, environment):
    samples, tokenizer = rollouts(tiny, environment), tiny.adapter.tokenizer
    assert len(samples) == len(SCRIPTS)  # each conversation is one sequence
    assert [len(sample.images) for sample in samples] == [4, 4, 4, 4, 2, 1]
    for sample, script in zip(samples, SCRIPTS, strict=True):
        said = "".join(f"{text}{tokenizer.eos_token}" for text in [*script, "red"])
        assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == said
        shown = tokenizer.decode(sample.input_ids[~sample.loss_mask])
        assert shown.count("<tool_response>") == sum(text.count("<tool_call>") for text in script)


def test_packed_tool_turns_equal_separate_rows(tiny, environment, tmp_path):
    """Rows share a system prompt, an image, and the results of equal calls."""
    assert_rows_are_separate(tiny, tiny.model(), rollouts(tiny, environment), tmp_path)


def test_packed_step_of_tool_turns_equals_padded_step(tiny, environment):
    samples, done = rollouts(tiny, environment), []
    limits = {"max_tokens_per_micro_batch": 8192, "max_rows_per_micro_batch": 64}
    for packing in (False, True):
        learner = learner_of(tiny, tiny.model(), packing=packing, adam_epsilon=1e-3, kl_coefficient=0.1, **limits)
        done.append(stepped(learner, tiny, samples))
    plain, packed = done
    assert_same_step(packed, plain)
    assert packed.metrics["tokens/computed"] < 0.5 * packed.metrics["tokens/total"]
