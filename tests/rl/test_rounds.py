"""The units of a run with dynamic sampling, on a scripted policy and a trainer that only records its batches."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import load_recipe
from armature.components.configuration.stages import TerminalEvents, ThreadUnits
from armature.components.contracts.batches import Sample, TurnAdvantages
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.contracts.stages import StageContext
from armature.components.inference.client import Completion
from armature.components.models.adapters.sequences import merge_turns, sample_of
from armature.components.rl.loop import run_loop
from armature.components.rl.open import skipped_batches
from armature.components.rl.run import RLRun, RunParts
from armature.components.rl.settings import TrainVLMSettings
from armature.components.rollouts.batches.table import MOST_TOKENS, read_batch
from armature.components.rollouts.play import RolloutId
from armature.components.rollouts.sampler import difficulty, tasks_of_step
from armature.components.rollouts.table import read_rollouts
from tests.refusals import refused

GROUPS, MEMBERS, STEPS, MAX_ROUNDS, SEED = 4, 2, 3, 5, 6


class Tells:
    """An environment with episodes of two turns. The second answer decides the reward.

    Only tasks with even numbers can be solved, so only in their groups do rewards differ.
    """

    name, system_prompt, dialogue, max_turns = "tells", None, True, 4
    reward_weights: Mapping[str, float] = {"right": 1.0}

    def tasks(self, split: Any) -> list[Task]:
        return [Task(f"{number}", split, {"tells": number % 2 == 0}) for number in range(20)]

    def episode(self, task: Task) -> TellsEpisode:
        return TellsEpisode(task)

    def close(self) -> None: ...


class TellsEpisode:
    def __init__(self, task: Task) -> None:
        self.task, self.done = task, False

    async def reset(self) -> Observation:
        return Observation(("first?",), anchor_key="first")

    async def step(self, action: str) -> Outcome:
        assert not self.done
        if action == "first":
            return Outcome(Observation(("second?",), anchor_key="second"))
        self.done = True
        return Outcome(None, {"right": float(self.task.payload["tells"] and action == "odd")})

    async def close(self) -> None: ...


class Scripted:
    """A policy that answers "first" in the first turn. In the second turn it answers "odd" or "even", depending on the
    seed. The members of a group have consecutive seeds."""

    def __init__(self, delay: float) -> None:
        self.delay, self.requests, self.version = delay, 0, 0

    async def complete(self, messages: Sequence[dict[str, Any]], sampling: object, seed: int) -> Completion:
        self.requests += 1
        await asyncio.sleep(self.delay * (seed % 5))
        text = "first" if len(messages) == 1 else ("odd" if seed % 2 else "even")
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        prompt = np.arange(5 * len(messages), dtype=np.int32)
        return Completion(prompt, ids, -np.ones(len(ids), np.float32), text, "stop", self.version, "script", 0.0)


class NotingTrainer:
    alive = True

    def __init__(self, pool: Scripted) -> None:
        self.pool, self.batches = pool, dict[int, list[Sample]]()

    def step(self, step: int, folder: Path, log_ratios: Path | None = None) -> dict[str, float]:
        self.batches[step] = read_batch(folder)
        return {"loss": 0.0}

    def score(self, folder: Path) -> list[Any]:
        return []

    def probe(self, probe: None, version: int) -> None: ...

    def save(self) -> None: ...

    def publish(self, folder: Path, version: int) -> None: ...


class PoolOfOne:
    """A replacement for the server pool, with one scripted policy and the methods that a run calls."""

    def __init__(self, policy: Scripted) -> None:
        self.complete = policy.complete
        self._policy, self.weights = policy, SimpleNamespace(probe=None, version=0)
        self.replicas = [policy]

    async def sync(self, folder: Path, version: int, send: None = None, answer: None = None) -> None:
        self._policy.version = self.weights.version = version

    async def reset_caches(self) -> None: ...


class Unmerged:
    def samples(
        self, outputs: GenerateOutputs, advantages: TurnAdvantages | None = None
    ) -> tuple[list[Sample], Counter[str]]:
        merged = [(one, turns) for one in outputs.trajectories for turns in merge_turns(one.turns, False)]
        return [sample_of(one, turns, advantages) for one, turns in merged], Counter()


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


def context(folder: Path) -> StageContext:
    machine = Machine.model_validate({})
    return StageContext(machine, TerminalEvents(), ThreadUnits(), folder, folder / "images", "run")


class Attempt:
    """A run in `folder`, where an earlier attempt may have left its results."""

    def __init__(
        self,
        folder: Path,
        portal: BlockingPortal,
        staleness: int,
        delay: float = 0.0,
        adapter: Unmerged | None = None,
        sync_every: int = 1,
        repeat: float = 1.0,
        in_flight: bool = False,
        policy: Scripted | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        overrides = (
            f"rollouts.groups_per_step={GROUPS}",
            f"rollouts.group_size={MEMBERS}",
            f"rollouts.max_rounds={MAX_ROUNDS}",
            f"rollouts.max_staleness={staleness}",
            f"rollouts.in_flight_updates={str(in_flight).lower()}",
            f"rollouts.seed={SEED}",
            f"rollouts.repeat_no_signal={repeat}",
            f"trainer.max_steps={STEPS}",
        )
        settings = load_recipe("train-vlm/colors", overrides).settings_for(TrainVLMSettings)
        assert isinstance(settings, TrainVLMSettings)
        self.store, self.policy = ArtifactStore(folder), policy or Scripted(delay)
        self.trainer = NotingTrainer(self.policy)
        parts = RunParts(
            environment=Tells(),
            tasks=Tells().tasks("train"),
            adapter=adapter or Unmerged(),
            tokenizer=None,
            vocabulary=(MOST_TOKENS, MOST_TOKENS),
            servers=cast(Any, PoolOfOne(self.policy)),
            trainer=cast(Any, self.trainer),
            digests={},
            sync_every=sync_every,
        )
        self.run = RLRun(settings.loop, context(folder), self.store, parts, portal)

    def go(self, first: int = 1, last: int = STEPS) -> Attempt:
        run_loop(self.run, first, replace(self.run.plan, last=last), ThreadUnits(), TerminalEvents())
        return self

    def trajectories(self) -> dict[int, tuple[Trajectory, ...]]:
        made = {step: self.store.find("rollouts", f"run-{step:05d}") for step in range(1, STEPS + 1)}
        return {step: read_rollouts(artifact.path).trajectories for step, artifact in made.items() if artifact}

    def played(self) -> dict[int, list[tuple[str, str]]]:
        """Return a pair (trajectory id, task id) for each trajectory, by step."""
        return {step: [(one.trajectory_id, one.task_id) for one in made] for step, made in self.trajectories().items()}

    def versions(self) -> dict[int, list[tuple[int, ...]]]:
        """Return, by step, a tuple for each trajectory.

        It has the versions of the weights that sampled the turns.
        """
        return {
            step: [tuple(turn.policy_version for turn in one.turns) for one in made]
            for step, made in self.trajectories().items()
        }


@pytest.mark.parametrize("staleness", [0, 1])
def test_step_plays_rounds_until_enough_groups_differ(tmp_path: Path, portal: BlockingPortal, staleness: int) -> None:
    attempt = Attempt(tmp_path, portal, staleness).go()
    history = attempt.run.history.read()
    played = attempt.played()
    assert len({len(one) for one in played.values()}) > 1  # not always as many rounds
    assert any(metrics["groups/surplus"] for metrics in history)
    for step, metrics in zip(range(1, STEPS + 1), history, strict=True):
        rounds = len(played[step]) // (GROUPS * MEMBERS)
        planned = [tasks_of_step(attempt.run.parts.tasks, GROUPS, step, SEED, number) for number in range(rounds)]
        firsts = {one: task for one, task in played[step] if one.endswith("-00")}
        assert list(firsts.values()) == [task.task_id for each in planned for task in each]
        differ = [one for one, task in played[step] if int(task) % 2 == 0 and one.endswith("-00")]
        assert metrics["groups/rounds"] == rounds and metrics["groups/played"] == rounds * GROUPS
        assert metrics["rollouts/planned"] == len(played[step])
        assert metrics["groups/equal_rewards"] == rounds * GROUPS - len(differ)
        assert metrics["groups/surplus"] == max(0, len(differ) - GROUPS)
        assert metrics["drops/equal_rewards_group"] == MEMBERS * metrics["groups/equal_rewards"]
        trained = dict.fromkeys(sample.group_id for sample in attempt.trainer.batches[step])
        assert list(trained) == [one.removesuffix("-00") for one in differ[:GROUPS]]
        assert rounds == MAX_ROUNDS or len(differ) >= GROUPS
        assert {sample.advantages.any() for sample in attempt.trainer.batches[step]} == {True}
    turns = sum(len(one) for one in played.values()) * 2
    assert attempt.policy.requests == turns  # no request after an episode was done


def test_difficulty_counts_groups_over_all_steps(tmp_path: Path, portal: BlockingPortal) -> None:
    attempt = Attempt(tmp_path, portal, staleness=0).go()
    tasks = {one.task_id: one for one in difficulty(attempt.run.groups(STEPS))}
    played = [task for each in attempt.played().values() for one, task in each if one.endswith("-00")]
    assert {task: one.groups for task, one in tasks.items()} == Counter(played)
    for task, one in tasks.items():
        assert one.differing == (one.groups if int(task) % 2 == 0 else 0)
        assert one.all_wrong == one.groups - one.differing


def test_skipped_batch_is_remembered_on_resume(tmp_path: Path, portal: BlockingPortal) -> None:
    first = Attempt(tmp_path, portal, staleness=0).go(last=2)
    poisoned = first.store.find("batches", "run-00002")
    assert poisoned is not None and first.trainer.batches[2]
    again = Attempt(tmp_path, portal, staleness=0)
    with refused("steps_not_skippable", "1, 9", f"1 of {STEPS}"):
        skipped_batches(tmp_path, (1, 2, 9), 1, STEPS)
    assert skipped_batches(tmp_path, (2,), 1, STEPS) == {2}
    again.run.skipped = skipped_batches(tmp_path, (), 2, STEPS)
    again.go(first=2)
    assert again.trainer.batches[2] == [] and again.trainer.batches[3]
    rows = {row["step"]: row for row in again.run.history.read()}
    assert rows[2]["batch/skipped"] == 1 and rows[2]["drops/batch_skipped"] == len(again.played()[2])
    assert "batch/skipped" not in rows[1] and "batch/skipped" not in rows[3]
    lineage = {row["step"]: row for row in again.run.lineage(STEPS)}
    assert lineage[2]["skipped"] == poisoned.digest != lineage[2]["batch"]
    assert "skipped" not in lineage[1]
    assert again.played()[2] == first.played()[2]


def test_invalid_sample_is_dropped_and_counted(tmp_path: Path, portal: BlockingPortal) -> None:
    class Poisons(Unmerged):
        def samples(
            self, outputs: GenerateOutputs, advantages: TurnAdvantages | None = None
        ) -> tuple[list[Sample], Counter[str]]:
            samples, drops = super().samples(outputs, advantages)
            ids = samples[0].input_ids.copy()
            ids[0] = -1
            return [replace(samples[0], input_ids=ids), *samples[1:]], drops

    attempt = Attempt(tmp_path, portal, staleness=0, adapter=Poisons()).go(last=1)
    (row,) = attempt.run.history.read()
    assert row["drops/bad_input_ids"] == 1
    assert len(attempt.trainer.batches[1]) == row["samples/count"] > 0


class Waits(Scripted):
    """A policy that delays the second turns of the episodes of step 3 until it has new weights.

    So the two turns of these episodes are sampled with different weights.
    """

    late = frozenset(RolloutId(3, group, member).request_seed(SEED, 1) for group in range(4) for member in range(2))

    async def complete(self, messages: Sequence[dict[str, Any]], sampling: object, seed: int) -> Completion:
        while seed in self.late and self.version == 0:
            await asyncio.sleep(0.01)
        return await super().complete(messages, sampling, seed)


def test_in_flight_weights_change_within_staleness(tmp_path: Path, portal: BlockingPortal) -> None:
    plain = Attempt(tmp_path / "plain", portal, staleness=0).go()
    attempt = Attempt(tmp_path / "ahead", portal, staleness=2, in_flight=True, policy=Waits(0.002)).go()
    assert attempt.played() == plain.played()
    for step, versions in attempt.versions().items():
        assert all(max(0, step - 3) <= version < step for each in versions for version in each)
        assert all(list(each) == sorted(each) for each in versions)
    assert all(first == 0 < second for first, second in attempt.versions()[3][: GROUPS * MEMBERS])


@pytest.mark.parametrize("repeat", [1.0, 0.1])
def test_resumed_run_plays_same_tasks(tmp_path: Path, portal: BlockingPortal, repeat: float) -> None:
    whole = Attempt(tmp_path / "whole", portal, staleness=1, delay=0.0, repeat=repeat).go()
    Attempt(tmp_path / "cut", portal, staleness=0, delay=0.002, repeat=repeat).go(last=1)
    resumed = Attempt(tmp_path / "cut", portal, staleness=1, delay=0.001, repeat=repeat).go(first=2)
    assert resumed.played() == whole.played()
    again = Attempt(tmp_path / "whole", portal, staleness=1, repeat=repeat).go()
    assert again.policy.requests == 0  # all rollouts are in the store
    metrics = "metrics.json"
    for step in range(1, STEPS + 1):
        batches = [one.store.find("batches", f"run-{step:05d}") for one in (whole, resumed)]
        one, other = (json.loads((artifact.path / metrics).read_text()) for artifact in batches if artifact)
        assert one == other
