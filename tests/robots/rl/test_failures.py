"""Episodes that fail in all attempts: which ones fail, how their groups are used, and when the training ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import read_manifest
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.rollouts import Failure
from armature.components.contracts.stages import Artifact
from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.libero.processes import ChunkResult
from armature.components.robots.libero.progress import GoalProgress
from armature.components.robots.policies.player import FlowChunk, TokenChunk, open_flow_policy
from armature.components.robots.rl.batch import build_batch
from armature.components.robots.rl.collect import CollectedEpisodes, Collector
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.table import ROLLOUTS_FILE, read_batch, read_rollouts, write_rollouts
from armature.components.rollouts.table import FAILURES_FILE, read_failures, write_failures
from tests.refusals import refused
from tests.robots.evaluation.playground import TASKS
from tests.robots.rl.kitchen import Kitchen, calm_policy, rollout_settings
from tests.robots.rl.test_batch import GRPO, answers
from tests.robots.rl.test_run import rows, settings, train


class Fragile(Kitchen):
    """A simulator whose process dies, with all its slots, when a point is pushed farther than `edge` to the right of
    its start."""

    def __init__(self, edge: float) -> None:
        super().__init__()
        self._edge = edge

    def _carry_out(self, actions: NDArray[np.float32], slot: int, film: bool) -> ChunkResult:
        carried = super()._carry_out(actions, slot, film)
        if carried.observation.state[0] > self._starts[slot] + self._edge:
            self._points.clear()
            raise WorkerError("the physics failed and took the process along")
        return carried


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("start")
    calm_policy(folder)
    return Artifact(kind="policy", path=folder, digest="0")


def collect(folder: Path, start: Artifact, processes: list[Kitchen], **changes: object) -> CollectedEpisodes:
    plan = rollout_settings(noise_level=1.0, failed_fraction=0.9, **changes)
    policy = open_flow_policy(start.path, "continuous", rows=1)
    collector = Collector(plan, policy, processes, ImageStore(folder / "images"), lambda done, total: None)
    return collector.collect(plan_step(plan, TASKS, 1), 1, 0, bootstrap=False)


EDGE = 0.25


def test_failed_episodes_do_not_depend_on_batch_or_processes(tmp_path: Path, start: Artifact) -> None:
    """An episode is played to its end even if its neighbor kills the shared process repeatedly."""
    safe = collect(tmp_path, start, [Kitchen()])
    tables = []
    for batch, processes in ((1, 1), (8, 1), (8, 3)):
        played = collect(tmp_path, start, [Fragile(EDGE) for _ in range(processes)], batch=batch)
        folder = tmp_path / f"{batch}x{processes}"
        folder.mkdir()
        write_rollouts(folder, played.answers)
        write_failures(folder, played.failures)
        tables.append([(folder / name).read_bytes() for name in (ROLLOUTS_FILE, FAILURES_FILE)])
    assert tables[0] == tables[1] == tables[2]
    lost = {failure.trajectory_id for failure in played.failures}
    assert 2 <= len(lost) <= 6 and {failure.reason for failure in played.failures} == {"environment_error"}
    assert all("took the process along" in failure.detail for failure in played.failures)
    left = [each for each in safe.answers if each.episode_id not in lost]
    assert [(each.episode_id, each.chunk, each.actions.tobytes()) for each in played.answers] == [
        (each.episode_id, each.chunk, each.actions.tobytes()) for each in left
    ]


def test_too_many_failed_episodes_end_the_step_and_name_reasons(tmp_path: Path, start: Artifact) -> None:
    plan = rollout_settings(failed_fraction=0.3)
    policy = open_flow_policy(start.path, "continuous", rows=1)
    collector = Collector(plan, policy, [Fragile(-9.0)], ImageStore(tmp_path), lambda done, total: None)
    with refused("too_many_episodes_failed", "3 of 8", "3 environment_error", "took the process along"):
        collector.collect(plan_step(plan, TASKS, 1), 1, 0, bootstrap=False)
    assert collector.lost == 9


def test_remaining_episodes_of_a_group_are_compared() -> None:
    """Two of four episodes remain in group a, one in b, none in c."""
    failures = [
        Failure(f"{group}-{member}", group, "libero_spatial/0", "environment_error", "")
        for group, members in (("a", (2, 3)), ("b", (1, 2, 3)), ("c", (0, 1, 2, 3)))
        for member in members
    ]
    played = [*answers("a", (2, 1.0), (1, 0.0)), *answers("b", (3, 1.0))]
    built = build_batch(played, GRPO, failures=failures)
    assert [each.advantage for each in built.samples] == pytest.approx(
        [0.5 / (0.5**0.5 + 1e-4)] * 2 + [-0.5 / (0.5**0.5 + 1e-4)]
    )
    assert built.drops == {"group_agrees": 3}
    numbers = {name: built.metrics[name] for name in ("rollouts/planned", "rollouts/failed", "reward", "success")}
    assert numbers == {
        "rollouts/planned": 12,
        "rollouts/failed": 9,
        "reward": pytest.approx(2 / 3),
        "success": pytest.approx(2 / 3),
    }
    assert built.metrics["failures/environment_error"] == 9
    assert build_batch(played, GRPO, wanted=3, failures=failures).metrics["groups/rounds"] == 1.0


def test_run_continues_without_failed_episodes(
    tmp_path: Path, start: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = settings()
    plan = plan.model_copy(update={"rollouts": plan.rollouts.model_copy(update={"failed_fraction": 0.9})})
    run = train(tmp_path / "one", start, [Fragile(EDGE)], plan)
    history = run.history.read()
    assert [row["step"] for row in history] == [1, 2, 3]
    for step, row in enumerate(history, start=1):
        made = run.rollouts(step)
        failures = read_failures(made.path) if (made.path / FAILURES_FILE).exists() else ()
        played = read_rollouts(made.path)
        assert row["rollouts/failed"] == len(failures) == row.get("failures/environment_error", 0)
        assert row["rollouts/planned"] == 8 == len({each.episode_id for each in played}) + len(failures)
        assert read_manifest(made.path).drops == Counter(each.reason for each in failures)
        assert not {each.episode_id for each in read_batch(run.batch(step, made).path)} & {
            each.trajectory_id for each in failures
        }
    assert sum(row["rollouts/failed"] for row in history) >= 3 and sum(row["updates"] for row in history)
    output = " ".join(capsys.readouterr().out.split())
    assert all(
        f"step {step}: {row['rollouts/failed']:.0f} of 8 rollouts failed: {row['rollouts/failed']:.0f} environ"
        in output
        for step, row in enumerate(history, start=1)
        if row["rollouts/failed"]
    )
    many = train(tmp_path / "many", start, [Fragile(EDGE), Fragile(EDGE)], plan)
    assert rows(many) == rows(run) and many.lineage(3) == run.lineage(3)


class Blurred(Kitchen):
    """A simulator that reports NaN as the progress of a point that was pushed too far to the right."""

    def progress(self, slot: int = 0) -> list[GoalProgress]:
        (progress,) = super().progress(slot)
        return [replace(progress, reach=np.nan)] if self._points[slot][0] > self._starts[slot] + EDGE else [progress]


def test_non_finite_reward_fails_only_its_episode(tmp_path: Path, start: Artifact) -> None:
    reward = {"name": "potential"}
    safe = collect(tmp_path, start, [Kitchen()], reward=reward)
    blurred = collect(tmp_path, start, [Blurred()], reward=reward)
    fell = {failure.trajectory_id for failure in collect(tmp_path, start, [Fragile(EDGE)]).failures}
    assert {failure.reason for failure in blurred.failures} == {"bad_reward"}
    lost = {failure.trajectory_id for failure in blurred.failures}
    assert lost and lost <= fell  # where the last chunk does it, the reward does not depend on it
    left = [each.reward for each in safe.answers if each.episode_id not in lost]
    assert [each.reward for each in blurred.answers] == left and np.isfinite(left).all()
    assert "nan]" in blurred.failures[0].detail


class Dizzy:
    """Policy whose log-probs or values are not finite in some chunks."""

    rows_per_pass = 1

    def __init__(self, start: Artifact, **changes: object) -> None:
        self._inner, self._changes = open_flow_policy(start.path, "continuous", rows=1), changes

    def prepared(self, observation: RobotObservation) -> RobotObservation:
        return self._inner.prepared(observation)

    def sample_flow_sde(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], noise_level: float
    ) -> list[FlowChunk]:
        chunks = self._inner.sample_flow_sde(observations, seeds, noise_level)
        return [
            replace(each, **self._changes) if seed % 5 == 0 else each for each, seed in zip(chunks, seeds, strict=True)
        ]

    def sample_action_tokens(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], temperature: float
    ) -> list[TokenChunk]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"logprobs": np.full((4, 7), -np.inf)}, "bad_logprobs"), ({"value": float("nan")}, "bad_value")],
)
def test_non_finite_policy_output_fails_only_its_episode(
    changes: dict[str, object], reason: str, tmp_path: Path, start: Artifact
) -> None:
    plan = rollout_settings(failed_fraction=0.9)
    collector = Collector(plan, Dizzy(start, **changes), [Kitchen()], ImageStore(tmp_path), lambda *_: None)
    collected = collector.collect(plan_step(plan, TASKS, 1), 1, 0, bootstrap=False)
    assert 0 < len(collected.failures) < 8 and {failure.reason for failure in collected.failures} == {reason}
    assert collector.lost == 0 and all(np.isfinite(each.logprobs).all() for each in collected.answers)


class Cursed(Kitchen):
    """A simulator whose process dies in the first step of each episode that has the same start as the first episode."""

    def __init__(self) -> None:
        super().__init__()
        self.first: float | None = None

    def _carry_out(self, actions: NDArray[np.float32], slot: int, film: bool) -> ChunkResult:
        self.first = self._starts[slot] if self.first is None else self.first
        if self._starts[slot] == self.first:
            self._points.clear()
            raise WorkerError("a cursed state")
        return super()._carry_out(actions, slot, film)


def test_preflight_plays_another_group_if_the_first_fails(
    tmp_path: Path, start: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = settings(max_steps=1)
    plan = plan.model_copy(update={"rollouts": plan.rollouts.model_copy(update={"failed_fraction": 0.5})})
    assert train(tmp_path, start, [Cursed()], plan).history.read()[-1]["step"] == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "pre-flight: 4 of 8 rollouts failed: 4 environment_error" in output and "ratios within" in output
