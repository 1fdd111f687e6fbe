"""A MolmoAct2 checkpoint in the real simulator."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.stages import Artifact
from armature.components.robots.evaluation.results import read_perturbed, read_results
from armature.components.robots.evaluation.settings import EvaluateLiberoStageSettings
from armature.components.robots.evaluation.stage import evaluate_libero, evaluate_policy
from armature.components.robots.libero.processes import ChunkResult, SimulatorProcess
from armature.components.robots.libero.settings import PerturbationSettings
from armature.components.robots.libero.tasks import suite_tasks
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy, save_policy
from armature.components.robots.policies.player import open_flow_policy
from tests.robots.evaluation.playground import settings
from tests.robots.evaluation.test_stage import Events, context
from tests.robots.libero.simulated import simulator
from tests.robots.policies.molmoact2 import released

pytestmark = pytest.mark.slow

SIMULATOR = simulator(camera_name_mapping={"agentview": "front", "robot0_eye_in_hand": "wrist"})

RESTED = simulator(camera_name_mapping=SIMULATOR.camera_name_mapping, num_steps_wait=10)


def plan(batch: int, videos: int = 0) -> EvaluateLiberoStageSettings:
    evaluation = settings(
        tasks=(0,), episodes_per_task=4, max_steps={"libero_spatial": 5}, batch=batch, videos_per_task=videos
    )
    return EvaluateLiberoStageSettings(simulator=SIMULATOR, evaluation=evaluation)


class MortalSimulator(SimulatorProcess):
    """A simulator whose process is killed before its next step, if it is `doomed`."""

    doomed = False

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        if self.doomed and self.worker.pid is not None:
            os.kill(self.worker.pid, signal.SIGKILL)
            self.doomed = False
        return super().step(actions, slot, film)


def test_results_do_not_depend_on_batch_workers_or_deaths(tmp_path):
    for name in ("alone", "four", "two"):
        (tmp_path / name / "out").mkdir(parents=True)
    loaded = load_policy(
        released.write_released(tmp_path / "released"), released.SETTINGS.model_copy(update={"norm_tag": "kitchen"})
    )
    save_policy(tmp_path / "policy/checkpoint", loaded.parts, loaded.model.state_dict())
    artifact = Artifact(kind="policy", path=tmp_path / "policy", digest="0")

    alone, events = tmp_path / "alone/out", Events()
    evaluate_libero(plan(1, videos=1), {"policy": artifact}, alone, context(tmp_path / "alone", events))
    results = read_results(alone)
    assert [(each.initial_state, each.steps, each.success) for each in results] == [(k, 5, False) for k in range(4)]
    assert len({each.actions for each in results}) == 4
    assert events.lines[-1] == "videos 1/1"
    with av.open(str(alone / json.loads((alone / "eval_info.json").read_text())["overall"]["video_paths"][0])) as video:
        assert sum(1 for _ in video.decode(video=0)) == 6

    existing = {"libero_spatial": suite_tasks("libero_spatial")}
    policy = open_flow_policy(tmp_path / "policy", "continuous", rows=1)
    with MortalSimulator(SIMULATOR, 120) as one, MortalSimulator(SIMULATOR, 120) as other:
        for name, batch, simulators in (("four", 4, [one]), ("two", 2, [one, other])):
            one.doomed = other.doomed = name == "two"
            out, where = tmp_path / name / "out", context(tmp_path / name, Events())
            report = evaluate_policy(policy, existing, simulators, plan(batch), out, where)
            assert (out / "results.parquet").read_bytes() == (alone / "results.parquet").read_bytes()
            assert ("attempts lost with their simulator" in report.drops) == (name == "two")


def test_perturbed_results_do_not_depend_on_batch_or_workers(tmp_path):
    loaded = load_policy(
        released.write_released(tmp_path / "released"), released.SETTINGS.model_copy(update={"norm_tag": "kitchen"})
    )
    save_policy(tmp_path / "policy/checkpoint", loaded.parts, loaded.model.state_dict())
    policy, existing = open_flow_policy(tmp_path / "policy", "continuous", rows=1), suite_tasks("libero_spatial")
    perturbations = PerturbationSettings(layout=(1.0,), texture=(1.0,))
    evaluation = settings(
        tasks=(0,), episodes_per_task=1, max_steps={"libero_spatial": 5}, videos_per_task=0, perturbations=perturbations
    )
    tables = []
    with SimulatorProcess(RESTED, 120) as one, SimulatorProcess(RESTED, 120) as other:
        for batch, simulators in ((1, [one]), (3, [other, one])):
            folder = tmp_path / str(batch)
            (folder / "out").mkdir(parents=True)
            chosen = EvaluateLiberoStageSettings(
                simulator=RESTED, evaluation=evaluation.model_copy(update={"batch": batch})
            )
            evaluate_policy(
                policy, {"libero_spatial": existing}, simulators, chosen, folder / "out", context(folder, Events())
            )
            tables.append((folder / "out/perturbed.parquet").read_bytes())
    assert tables[0] == tables[1]
    plain, changed = read_results(tmp_path / "1/out"), read_perturbed(tmp_path / "1/out")
    assert [each.label for each in changed] == ["texture/1", "layout/1"]
    assert len({each.actions for each in [*plain, *changed]}) == 3  # the policy saw something else each time


class Recorded:
    """A policy that returns recorded actions in chunks of 10, for one episode. After the last of them, its actions do
    nothing."""

    n_action_steps = 10
    action_dimensions = 7
    rows_per_pass = 1

    def __init__(self, actions: Sequence[NDArray[np.float32]]) -> None:
        self._left = list(actions)

    def prepared(self, observation: RobotObservation) -> RobotObservation:
        return observation

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        chunk, self._left = self._left[:10], self._left[10:]
        still = [np.array([0, 0, 0, 0, 0, 0, -1], np.float32)] * (10 - len(chunk))
        return np.stack([[*chunk, *still]])

    def facts(self) -> dict[str, Any]:
        return {}


def test_expert_succeeds_and_is_filmed(tmp_path):
    (tmp_path / "out").mkdir()
    task = suite_tasks("libero_spatial")[2]
    evaluation = settings(tasks=(2,), episodes_per_task=1, max_steps={"libero_spatial": 280}, seed=3, videos_per_task=1)
    chosen = EvaluateLiberoStageSettings(simulator=SIMULATOR, evaluation=evaluation)
    with SimulatorProcess(SIMULATOR, 120) as simulator:
        shown = simulator.demonstrate(task, initial_state=0, seed=3, noise=0.0, limit=280)
        policy = Recorded([action for _, action in shown.steps])
        report = evaluate_policy(
            policy, {"libero_spatial": [task]}, [simulator], chosen, tmp_path / "out", context(tmp_path, Events())
        )
    assert shown.outcome.success
    (result,) = read_results(tmp_path / "out")
    assert result.success
    assert 50 < result.steps <= shown.outcome.steps
    assert np.array_equal(
        np.array(result.actions, np.float32).reshape(-1, 7), [action for _, action in shown.steps[: result.steps]]
    )
    assert report.rows == {"episodes": 1, "videos": 1} and not report.drops
    assert "solved after" in (tmp_path / "out/report.html").read_text()
