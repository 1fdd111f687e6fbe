"""Rollouts from a real vLLM server, single- and multi-turn."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.settings import ServerSettings
from armature.components.rollouts.collect import collect
from armature.components.rollouts.schedule import tasks_of_step
from armature.components.rollouts.table import read_rollouts, write_rollouts

from .conftest import SAMPLING

IMAGE = {
    "colors": {"red": [220, 40, 40], "green": [40, 170, 60], "blue": [40, 70, 220]},
    "image_size": 56,
    "noise": 16.0,
    "tint_jitter": 12.0,
    "brightness_jitter": 0.12,
    "correct_weight": 1.0,
    "format_weight": 0.1,
}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "colors": {**IMAGE, "question": "What colour is this?"},
    "recall": {
        **IMAGE,
        "images": 2,
        "filler_turns": 1,
        "asked": "random",
        "remember": "Image {number}.",
        "filler": "Go on.",
        "question": "What colour was image {number}?",
    },
}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_groups_on_a_real_server(tmp_path, store, events, shared_server, joined_url):
    from armature.components.inference.pool import ServerPool

    checkpoint = shared_server.checkpoint
    machine = Machine(endpoints=(joined_url,), ready_timeout=400)
    server = ServerSettings(max_model_len=1024, max_images_per_prompt=2, dtype="float32")
    outputs: dict[str, GenerateOutputs] = {}
    async with ServerPool(checkpoint, server, machine, tmp_path / "logs") as pool:
        for name, args in ENVIRONMENTS.items():
            settings = EnvironmentSettings(name=name, args=args, train_tasks=24, heldout_tasks=8, seed=0)
            environment = make_environment(settings)
            tasks = tasks_of_step(list(environment.tasks("train")), 8, step=1, seed=3)
            outputs[name] = await collect(
                environment, tasks, 4, pool, store, SAMPLING, step=1, seed=3, machine=machine, events=events
            )
    image_token = json.loads((checkpoint / "config.json").read_text())["image_token_id"]
    for name, turns in (("colors", 1), ("recall", 4)):
        collected = outputs[name]
        assert len(collected.trajectories) + len(collected.failures) == 32
        assert set(collected.drops) <= {"placeholder_sampled", "prompt_too_long"}
        assert len(collected.trajectories) >= 28
        for trajectory in collected.trajectories:
            assert len(trajectory.turns) == turns and not trajectory.truncated
            for turn in trajectory.turns:
                assert turn.policy_version == 0 and 0 < turn.completion_token_ids.size <= SAMPLING.max_tokens
                assert (turn.completion_logprobs <= 0).all() and turn.finish_reason in ("stop", "length")
                # 56 pixels are 4 x 4 patches of 14, merged 2 x 2
                assert (turn.prompt_token_ids == image_token).sum() == 4 * len(turn.images)
            assert [len(turn.images) for turn in trajectory.turns] == ([1] if turns == 1 else [1, 2, 2, 2])
        group = [t for t in collected.trajectories if t.group_id == collected.trajectories[0].group_id]
        assert len({tuple(t.turns[0].completion_token_ids) for t in group}) > 1
        assert all(np.array_equal(t.turns[0].prompt_token_ids, group[0].turns[0].prompt_token_ids) for t in group)
        folder = tmp_path / name
        folder.mkdir()
        write_rollouts(folder, collected)
        assert [t.trajectory_id for t in read_rollouts(folder).trajectories] == [
            t.trajectory_id for t in collected.trajectories
        ]
