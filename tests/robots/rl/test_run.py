"""Runs of a few steps with a trainer in this process: their outputs, and that interruption does not change them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from armature.components.artifacts.images import ImageStore
from armature.components.configuration.stages import TerminalEvents, ThreadUnits, open_store
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact, StageContext, not_sent
from armature.components.robots.evaluation.settings import TrainLiberoEvaluationSettings
from armature.components.robots.libero.settings import SimulatorSettings
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy
from armature.components.robots.policies.player import open_flow_policy
from armature.components.robots.rl.client import RobotRLTrainerClient, RobotRLTraining
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.heldout import RobotEvaluations
from armature.components.robots.rl.run import RobotRLRun
from armature.components.robots.rl.settings import RobotPreflightSettings, RobotRLTrainerSettings, TrainVLARLSettings
from armature.components.robots.rl.stage import summary
from armature.components.robots.rl.table import read_batch, read_rollouts
from armature.components.robots.rl.worker import RobotRLWorker
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import service_settings
from tests.builders import make_machine
from tests.refusals import refused
from tests.robots.evaluation.playground import TASKS
from tests.robots.rl.kitchen import Kitchen, calm_policy, rollout_settings


def settings(
    evaluation: dict[str, Any] | None = None, max_staleness: int = 0, max_rounds: int = 1, **changes: Any
) -> TrainVLARLSettings:
    values = {"max_steps": 3, "micro_batch_size": 8, "learning_rates": {"action_expert": 1e-3}, "samples_per_update": 8}
    return TrainVLARLSettings(
        simulator=SimulatorSettings(),
        rollouts=rollout_settings(
            batch=4, max_steps=6, noise_level=1.0, max_staleness=max_staleness, max_rounds=max_rounds
        ),
        trainer=RobotRLTrainerSettings.model_validate(values | changes),
        preflight=RobotPreflightSettings(),
        evaluation=None if evaluation is None else heldout_set(**evaluation),
    )


def heldout_set(**changes: Any) -> TrainLiberoEvaluationSettings:
    values: dict[str, Any] = {
        "suites": ("libero_spatial",),
        "tasks": (0, 2),
        "initial_states": (1, 2, 4),
        "heldout_episodes": 6,
        "max_steps": {"libero_spatial": 6},
        "batch": 2,
        "rows_per_pass": 1,
        "every": 1,
    }
    return TrainLiberoEvaluationSettings.model_validate(values | changes)


GRPO = settings()
PPO = settings(advantage={"name": "gae", "value_lr": 1e-2}, micro_batch_size=1, kl_coefficient=0.1)
AHEAD = settings(evaluation={"every": 2}, max_staleness=1)


class InProcessTrainer(RobotRLTrainerClient):
    alive = True  # type: ignore[assignment]

    def __init__(self, training: RobotRLTraining, machine: Machine, folder: Path) -> None:
        self.machine, self._saved = machine, not_sent
        self._worker = RobotRLWorker(service_settings(training, machine, folder), Ranks())

    def _ask(self, name: str, timeout: float, result: TypeAdapter[Any], **arguments: Any) -> Any:
        command = {"name": name, **arguments}
        recorded = self._worker.recorded(command)
        answer = self._worker.run(command, self._worker.check(command)) if recorded is None else recorded
        return result.validate_python(answer)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("start")
    calm_policy(folder)
    return Artifact(kind="policy", path=folder, digest="0")


def train(folder: Path, start: Artifact, processes: Sequence[Kitchen], settings: TrainVLARLSettings) -> RobotRLRun:
    machine = make_machine(store=folder / "store")
    store = open_store(machine)
    context = StageContext(machine, TerminalEvents(), ThreadUnits(), folder / "work", store.images, "f")
    context.workspace.mkdir(parents=True, exist_ok=True)
    training = RobotRLTraining(
        trainer=settings.trainer, rollouts=settings.rollouts, policy=start.path, images=store.images, fingerprint="f"
    )
    mode = settings.rollouts.inference_action_mode
    policy = open_flow_policy(start.path, mode, rows=1, quantization=settings.rollouts.quantization)
    collector = Collector(settings.rollouts, policy, processes, ImageStore(store.images), lambda done, total: None)
    trainer = InProcessTrainer(training, machine, context.workspace / "trainer")
    evaluations = None
    if settings.evaluation is not None:
        examined = policy.reconfigured(settings.evaluation.inference_action_mode, rows=1)
        tasks = {"libero_spatial": TASKS}
        last = settings.trainer.max_steps
        evaluations = RobotEvaluations(settings.evaluation, tasks, examined, processes, {}, context, store, last)
    run = RobotRLRun(settings, context, store, policy, TASKS, collector, trainer, start, evaluations)
    run.resume(done := trainer.resume())
    run.finish(folder / "checkpoint", run.train_from(done))
    return run


def rows(run: RobotRLRun) -> list[dict[str, float]]:
    """Return the training history without the metrics that depend on the machine."""
    timed = ("timing/", "memory/", "answers_per_second", "simulator/", "policy/", "machine/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.history.read()]


@pytest.mark.parametrize("plan", [GRPO, pytest.param(PPO, marks=pytest.mark.long), AHEAD], ids=["grpo", "ppo", "ahead"])
def test_resumed_run_equals_uninterrupted_run(plan: TrainVLARLSettings, tmp_path: Path, start: Artifact) -> None:
    whole = train(tmp_path / "whole", start, [Kitchen()], plan)
    history = whole.history.read()
    if plan is AHEAD:
        assert history.pop(0)["step"] == 0
    assert [row["step"] for row in history] == [1, 2, 3]
    versions = [{each.policy_version for each in read_rollouts(whole.rollouts(step).path)} for step in (1, 2, 3)]
    assert versions == [{max(step - 1 - plan.rollouts.max_staleness, 0)} for step in (1, 2, 3)]
    assert sum(row["updates"] for row in history) > 1 and history[0]["rollouts/planned"] == 8
    assert summary(history)["reward"] == history[-1]["reward"]

    class Doomed(Kitchen):
        """A simulator whose process dies after some action chunks and cannot be restarted."""

        def __init__(self) -> None:
            super().__init__(range(35 if plan is AHEAD else 15, 10_000))

    with refused("too_many_episodes_failed", 2):
        train(tmp_path / "stopped", start, [Doomed(), Doomed()], plan)
    resumed = train(tmp_path / "stopped", start, [Kitchen(), Kitchen()], plan)
    assert rows(resumed) == rows(whole) and resumed.lineage(3) == whole.lineage(3)
    made = "work/weights/000003" if plan is AHEAD else "checkpoint"  # evaluations keep the best, which may be the first
    weights = [load_file(tmp_path / name / made / "model.safetensors") for name in ("whole", "stopped")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    before = load_file(start.path / "checkpoint/model.safetensors")
    changed = {name for name, value in before.items() if not torch.equal(value, weights[0][name])}
    assert changed and all("action_expert" in name for name in changed)
    if plan is PPO:
        heads = [load_file(tmp_path / name / "checkpoint/value_head.safetensors") for name in ("whole", "stopped")]
        assert all(torch.equal(value, heads[1][name]) and value.any() for name, value in heads[0].items())


def test_expert_trains_on_8_bit_text_layers_and_publishes_16_bit_ones(tmp_path: Path) -> None:
    calm_policy(tmp_path / "start", dtype="bfloat16")
    start = Artifact(kind="policy", path=tmp_path / "start/checkpoint", digest="0")
    rollouts = rollout_settings(batch=4, max_steps=6, noise_level=1.0, quantization="fp8")
    plan = settings(mode="expert", micro_batch_size=1).model_copy(update={"rollouts": rollouts})
    run = train(tmp_path / "run", start, [Kitchen()], plan)  # its pre-flight refuses ratios that are not 1
    assert all(row["importance_ratio"] == pytest.approx(1.0, abs=0.5) for row in run.history.read())
    after = load_policy(tmp_path / "run/checkpoint").model.state_dict()
    before = load_policy(start.path).model.state_dict()
    assert after.keys() == before.keys()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved and all(name.startswith("action_expert.") for name in moved)


def test_reports_steps_without_updates_and_lost_attempts(
    tmp_path: Path, start: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = settings(max_steps=1).model_copy(update={"rollouts": rollout_settings(max_steps=1, batch=4)})
    run = train(tmp_path, start, [Kitchen((6,))], alike)  # the pre-flight plays 4 episodes, step 1 plays 8
    output = " ".join(capsys.readouterr().out.split())
    (row,) = run.history.read()
    assert row["updates"] == 0 and row["groups/zero_advantage_fraction"] == 1.0
    assert "step 1 changes no weight" in output and "0% of all episodes were solved" in output
    assert "attempts at episodes were lost with their simulator" in output
    assert len({each.episode_id for each in read_rollouts(run.rollouts(1).path)}) == 8


def test_stored_values_come_from_the_rollout_weights(tmp_path: Path, start: Artifact) -> None:
    run = train(tmp_path, start, [Kitchen()], PPO)
    first, second = (read_rollouts(run.rollouts(step).path) for step in (1, 2))
    assert {each.value for each in first} == {0.0} and len({each.value for each in second}) == len(second)
    for answers in (first, second):
        for each in answers:
            assert (each.last_value != 0.0) == (each.truncated and each.policy_version > 0)
    rows = run.history.read()
    assert rows[0]["value/mean"] == 0.0 and rows[1]["value/mean"] == pytest.approx(np.mean([a.value for a in second]))
    assert all(row["kl/start"] > 0 for row in rows)
    assert "learning_rate/value_head" in rows[0] and "groups/zero_advantage_fraction" not in rows[0]
    assert all(row["answers/trained"] == row["rollouts/planned"] * row["answers/per_episode"] for row in rows)


def test_plays_rounds_until_enough_groups_have_different_rewards(tmp_path: Path, start: Artifact) -> None:
    run = train(tmp_path, start, [Kitchen()], settings(max_rounds=4, max_steps=2))
    for step, row in enumerate(run.history.read(), start=1):
        played = read_rollouts(run.rollouts(step).path)
        earned: dict[str, dict[str, float]] = {}
        for each in played:
            episodes = earned.setdefault(each.group_id, {})
            episodes[each.episode_id] = max(each.reward, episodes.get(each.episode_id, 0.0))
        differs = [len(set(episodes.values())) > 1 for episodes in earned.values()]
        rounds = [differs[start : start + 2] for start in range(0, len(differs), 2)]
        needed = next((n for n in range(1, 4) if sum(sum(each) for each in rounds[:n]) >= 2), 4)
        assert len(rounds) == needed == row["groups/rounds"] and row["groups/count"] == len(differs)
        trained = {each.group_id for each in read_batch(run.batch(step, run.rollouts(step)).path)}
        assert trained == {name for name, each in zip(earned, differs, strict=True) if each and name in trained}
        assert len(trained) == min(2, sum(differs))


def test_summary_skips_metrics_that_a_step_lacks() -> None:
    history = [{"step": step, "reward": 0.5, "kl": 0.25} for step in range(1, 20)] + [{"step": 20, "reward": 0.0}]
    assert summary(history) == {"reward": 0.25, "kl": 0.25}
