"""Rollouts in the real simulator: the same bytes, however many episodes and processes there are at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.tasks import suite_tasks
from armature.components.robots.policies.molmoact2 import policy as policies
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import save_policy
from armature.components.robots.policies.molmoact2.policy import open_policy
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.table import ROLLOUTS_FILE, write_rollouts
from tests.robots.libero.simulated import needs_libero, simulator
from tests.robots.rl.kitchen import calm_policy, rollout_settings
from tests.robots.rl.test_tokens import spoken

pytestmark = [pytest.mark.slow, needs_libero]

SIMULATOR = simulator(camera_name_mapping={"agentview": "front", "robot0_eye_in_hand": "wrist"})
WAYS = ((1, 1), (8, 1), (4, 4))
"""Pairs of numbers to test: concurrent episodes, and processes of simulators."""


@pytest.fixture(scope="module")
def processes() -> Iterator[list[SimulatorProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(SimulatorProcess(SIMULATOR, 300)) for _ in range(4)]


@pytest.mark.parametrize("mode", ["continuous", pytest.param("discrete", marks=pytest.mark.long)])
def test_rollouts_do_not_depend_on_batch_or_processes(mode, processes, tmp_path, monkeypatch):
    monkeypatch.setattr(policies, "TOKENS_PER_ACTION", 3)  # random weights hardly ever end their answers
    if mode == "continuous":
        calm_policy(tmp_path)
    else:
        loaded = spoken(tmp_path)
        save_policy(tmp_path / "checkpoint", loaded.parts, loaded.model.state_dict())
    policy, existing, tables = open_policy(tmp_path, mode, rows=1), suite_tasks("libero_spatial"), []
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
