"""Rollouts in the real simulator: the same bytes, however many episodes and processes there are at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.configuration import load_recipe
from armature.components.contracts.stages import Artifact
from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.tasks import suite_tasks
from armature.components.robots.policies.molmoact2 import policy as policies
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import save_policy
from armature.components.robots.policies.player import open_flow_policy
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.table import ROLLOUTS_FILE, write_rollouts
from tests.end_to_end.conftest import make
from tests.end_to_end.test_robot_policy import CHAIN
from tests.robots.libero.simulated import needs_libero, simulator
from tests.robots.rl.kitchen import calm_policy, rollout_settings
from tests.robots.rl.test_smolvla import write_policy
from tests.robots.rl.test_tokens import spoken

pytestmark = [pytest.mark.slow, needs_libero]

SIMULATOR = simulator(camera_name_mapping={"agentview": "front", "robot0_eye_in_hand": "wrist"})
WAYS = ((1, 1), (8, 1), (4, 4))
"""Pairs of numbers to test: concurrent episodes, and processes of simulators."""


@pytest.fixture(scope="module")
def processes() -> Iterator[list[SimulatorProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(SimulatorProcess(SIMULATOR, 300)) for _ in range(4)]


@pytest.mark.parametrize(
    "mode", ["continuous", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("discrete", "smolvla"))]
)
def test_rollouts_do_not_depend_on_batch_or_processes(mode, processes, tmp_path, monkeypatch):
    monkeypatch.setattr(policies, "TOKENS_PER_ACTION", 3)  # random weights hardly ever end their answers
    if mode == "continuous":
        calm_policy(tmp_path)
    elif mode == "smolvla":
        write_policy(tmp_path)
        mode = "continuous"
    else:
        loaded = spoken(tmp_path)
        save_policy(tmp_path / "checkpoint", loaded.parts, loaded.model.state_dict())
    policy, existing, tables = (
        open_flow_policy(tmp_path, mode, rows=1),
        suite_tasks("libero_spatial"),
        [],
    )
    for batch, count in WAYS:
        settings = rollout_settings(tasks=(0,), max_steps=5, inference_action_mode=mode, batch=batch)
        images, folder = ImageStore(tmp_path / "images"), tmp_path / f"{batch}x{count}"
        collector = Collector(settings, policy, processes[:count], images, lambda done, total: None)
        answers = collector.collect(plan_step(settings, existing, 1), 1, 0, bootstrap=False).answers
        folder.mkdir()
        write_rollouts(folder, answers)
        tables.append((folder / ROLLOUTS_FILE).read_bytes())
    assert tables[0] == tables[1] == tables[2]
    assert len({each.episode_id for each in answers}) == 8 and {each.initial_state for each in answers} == {0, 3}
    assert len({each.logprobs.tobytes() for each in answers}) == len(answers) == 16
    seen = {each.images[0].sha256 for each in answers}  # a group begins with the same image
    assert len(seen) == 10 if mode == "continuous" else len(seen) > 2  # random tokens say no actions


@pytest.mark.long
def test_smolvla_imitates_and_learns_from_rewards(tmp_path):
    short = "demonstrations.episodes_per_task=2 training.max_steps=6 training.warmup_steps=0 trainer.max_steps=2 "
    short += "rollouts.group_size=4 rollouts.groups_per_step=1 rollouts.max_steps=10 rollouts.reward.name=progress "
    recipe = load_recipe("train-vla-rl/smolvla-tiny", [*short.split(), f'machine.store="{tmp_path / "store"}"'])
    artifacts: dict[str, Artifact] = {}
    for stage, inputs in (CHAIN | {"train-vla-rl": {"policy": "train-vla"}}).items():
        if stage != "evaluate-libero":
            artifacts[stage] = make(recipe, stage, **{name: artifacts[source] for name, source in inputs.items()})
    folder = artifacts["train-vla-rl"].path
    rows = json.loads((folder / "history.json").read_text())
    assert [row["step"] for row in rows] == [1, 2] and all(row["updates"] > 0 and row["grad_norm"] > 0 for row in rows)
    policy = open_flow_policy(folder, "continuous", rows=1)
    assert policy.facts()["family"] == "smolvla" and policy.n_action_steps == 10
