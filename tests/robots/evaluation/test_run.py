"""Playing an evaluation: its schedule, batches of observations, crashed simulators and errors."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from armature.components.contracts.errors import DataError
from armature.components.contracts.robots import RobotObservation
from armature.components.machine.workers.pool import StickyQueue
from armature.components.robots.evaluation.episode import EpisodeOutcome, EvaluationJournal
from armature.components.robots.evaluation.run import Evaluation, InferenceQueue
from armature.components.robots.evaluation.schedule import EpisodeKey, noise_seed, plan_episodes
from tests.refusals import refused
from tests.robots.evaluation.playground import TASKS, Homing, Plane, settings

pytestmark = pytest.mark.timeout(30)


def play(
    folder: Path, planes: Sequence[Plane], policy: Homing | None = None, **changes: object
) -> dict[EpisodeKey, EpisodeOutcome]:
    chosen = settings(**changes)
    planned = plan_episodes(chosen, {"libero_spatial": TASKS})
    evaluation = Evaluation(
        chosen, planned, EvaluationJournal(folder / "episodes.jsonl"), lambda finished, latest: None
    )
    return dict(evaluation.run(policy or Homing(), planes))


def ends(outcomes: dict[EpisodeKey, EpisodeOutcome]) -> dict[EpisodeKey, tuple[bool, bytes]]:
    return {key: (outcome.success, outcome.actions.tobytes()) for key, outcome in outcomes.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[EpisodeKey, EpisodeOutcome]:
    return play(tmp_path_factory.mktemp("alone"), [Plane()])


def test_playground_has_successes_and_failures(alone: dict[EpisodeKey, EpisodeOutcome]) -> None:
    assert len(alone) == 21
    assert {outcome.success for outcome in alone.values()} == {True, False}
    assert all(outcome.steps == 23 for outcome in alone.values() if not outcome.success)


@pytest.mark.parametrize(("batch", "processes"), [(4, 1), (4, 2), (3, 2), (40, 2)])
def test_results_do_not_depend_on_batch_or_processes(
    tmp_path: Path, alone: dict[EpisodeKey, EpisodeOutcome], batch: int, processes: int
) -> None:
    policy = Homing()
    outcomes = play(tmp_path, [Plane() for _ in range(processes)], policy, batch=batch)
    assert ends(outcomes) == ends(alone)
    assert max(policy.rows) <= policy.rows_per_pass
    assert sum(policy.rows) == sum(-(-outcome.steps // 4) for outcome in alone.values())


def test_episodes_of_a_crashed_simulator_are_repeated(tmp_path: Path, alone: dict[EpisodeKey, EpisodeOutcome]) -> None:
    plane = Plane(deaths=(2, 9, 30))
    outcomes = play(tmp_path, [plane], batch=1)
    assert ends(outcomes) == ends(alone)
    assert sum(outcome.lost for outcome in outcomes.values()) == 3
    shared = play(tmp_path / "shared", [Plane(deaths=(20,))], batch=4)
    assert ends(shared) == ends(alone)
    assert 1 <= sum(outcome.lost for outcome in shared.values()) <= 4


def test_failed_episodes_are_counted_up_to_the_limit(tmp_path: Path) -> None:
    outcomes = play(tmp_path, [Plane(deaths=(1, 2, 3))], failed_episodes=1)
    failed = [outcome for outcome in outcomes.values() if outcome.failure]
    assert [(each.success, each.steps, each.lost) for each in failed] == [(False, 0, 3)]
    assert "the process of the plane died" in str(failed[0].failure)
    with refused("too_many_episodes_failed", 2, 1):
        play(tmp_path / "more", [Plane(deaths=range(1, 7))], failed_episodes=1)
    resumed = play(tmp_path, [Plane()], failed_episodes=1)
    assert not any(outcome.failure for outcome in resumed.values())


def test_non_finite_state_fails_only_its_episode(tmp_path: Path, alone: dict[EpisodeKey, EpisodeOutcome]) -> None:
    class Exploding(Plane):
        """A simulator whose state becomes NaN in the first three attempts at an episode."""

        def _observe(self, slot: int) -> RobotObservation:
            seen = super()._observe(slot)
            return replace(seen, state=seen.state * np.nan) if self.resets <= 3 and self.steps else seen

    outcomes = play(tmp_path, [Exploding()], failed_episodes=1)
    failed = [key for key, outcome in outcomes.items() if outcome.failure]
    assert len(failed) == 1 and "the simulator's state is not finite" in str(outcomes[failed[0]].failure)
    assert ends({key: each for key, each in outcomes.items() if key not in failed}) == {
        key: each for key, each in ends(alone).items() if key not in failed
    }


class Counting(Homing):
    def __init__(self, limit: int, answer: NDArray[np.float32] | None = None) -> None:
        super().__init__()
        self._limit, self._answer = limit, answer

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        if sum(self.rows) >= self._limit:
            if self._answer is None:
                raise MemoryError
            return np.stack([self._answer] * len(seeds))
        return super().predict(observations, seeds)


def test_policy_error_ends_evaluation_and_resume_plays_the_rest(
    tmp_path: Path, alone: dict[EpisodeKey, EpisodeOutcome]
) -> None:
    with pytest.raises(MemoryError):
        play(tmp_path, [Plane(), Plane()], Counting(40), batch=4)
    journaled = EvaluationJournal(tmp_path / "episodes.jsonl").read()
    assert 0 < len(journaled) < 21
    with (tmp_path / "episodes.jsonl").open("ab") as file:
        file.write(b'{"key": ["libero_spatial", 0')
    plane = Plane()
    assert ends(play(tmp_path, [plane])) == ends(alone)
    assert plane.resets == 21 - len(journaled)
    untouched = Plane()
    assert ends(play(tmp_path, [untouched], batch=8)) == ends(alone)
    assert untouched.resets == 0


@pytest.mark.parametrize(
    ("answer", "code", "shape"),
    [
        (np.full((4, 7), np.nan, np.float32), "actions_not_finite", ""),
        (np.zeros((4, 6), np.float32), "action_shape_mismatch", (4, 6)),
        (np.zeros((0, 7), np.float32), "action_shape_mismatch", (0, 7)),
    ],
    ids=["nan", "six numbers", "no action"],
)
def test_rejects_invalid_actions_and_names_the_chunk(
    tmp_path: Path, answer: NDArray[np.float32], code: str, shape: object
) -> None:
    with refused(code, shape, "libero_spatial task 0 episode 0 (initial state 0), chunk 2"):
        play(tmp_path, [Plane()], Counting(2, answer))


SEEN = RobotObservation({}, np.zeros(1, np.float32), "")


def test_partial_batch_waits_only_for_players_that_play() -> None:
    calls: list[list[int]] = []

    def predict(observations: Sequence[RobotObservation], seeds: list[int]) -> list[int]:
        calls.append(sorted(seeds))
        time.sleep(0.4)
        return [seed * 10 for seed in seeds]

    queue = InferenceQueue[int](predict, 2, lambda observation: observation)
    answers: list[int] = []

    def player(number: int) -> Callable[[], None]:
        def play() -> None:
            for turn in range(3):
                time.sleep(0.05)  # its simulator
                answers.append(queue.ask(SEEN, 3 * number + turn).result())

        return play

    queue.serve([player(0), player(1)])
    assert sorted(answers) == [0, 10, 20, 30, 40, 50]
    together = [seeds for seeds in calls if len(seeds) == 2]
    assert len(together) >= 2, calls  # without waiting, the two take turns
    assert sum(map(len, calls)) == 6 and max(map(len, calls)) == 2


def test_observations_are_prepared_while_the_policy_computes() -> None:
    computing, prepared = threading.Event(), threading.Event()

    def prepare(observation: RobotObservation) -> RobotObservation:
        if observation.task == "later":
            assert computing.wait(10)
            prepared.set()
        return replace(observation, task=f"{observation.task}, prepared")

    def predict(observations: Sequence[RobotObservation], seeds: list[int]) -> list[str]:
        computing.set()
        assert prepared.wait(10)  # it would never be, if the thread that computes prepared
        return [observation.task for observation in observations]

    queue = InferenceQueue[str](predict, 1, prepare)
    answers: list[str] = []
    tasks = ("now", "later")
    queue.serve([lambda task=task: answers.append(queue.ask(replace(SEEN, task=task), 0).result()) for task in tasks])
    assert sorted(answers) == ["later, prepared", "now, prepared"]


def test_error_in_prepare_ends_the_evaluation() -> None:
    def prepare(observation: RobotObservation) -> RobotObservation:
        raise DataError("the observation has no camera", code="no_camera")

    queue = InferenceQueue[int](lambda observations, seeds: seeds, 2, prepare)
    with refused("no_camera"):
        queue.serve([lambda: queue.ask(SEEN, 0).result() and None] * 3)


KNOWN = {"libero_spatial": TASKS}


def test_planned_states_are_all_used_before_any_repeats() -> None:
    planned = plan_episodes(settings(episodes_per_task=12), KNOWN)
    for task in TASKS:
        states = [each.initial_state for each in planned if each.task == task]
        assert sorted(states[:5]) == sorted(states[5:10]) == [0, 1, 2, 3, 4]
        assert states[10:] == [0, 1]


def test_plan_uses_the_selected_initial_states() -> None:
    planned = plan_episodes(settings(tasks=(1,), initial_states=(4, 1), episodes_per_task=5), KNOWN)
    assert [each.initial_state for each in planned] == [4, 1, 4, 1, 4]
    assert [each.repetition for each in planned] == [0, 0, 1, 1, 2]


def test_plan_uses_the_selected_tasks() -> None:
    planned = plan_episodes(settings(tasks=(2, 0), episodes_per_task=1), KNOWN)
    assert [each.task.index for each in planned] == [0, 2]


@pytest.mark.parametrize(
    ("changes", "code", "values"),
    [
        ({"tasks": (9, 1, 3)}, "unknown_task", ("3, 9", "evaluation.tasks")),
        ({"tasks": (1, 1)}, "value_error", ("tasks: 1, 1",)),
        ({"initial_states": (0, 5)}, "unknown_initial_state", (5, "evaluation.initial_states")),
        ({"initial_states": (1, 1)}, "value_error", ("initial_states: 1, 1",)),
        ({"suites": ("libero_spatial", "libero_goal")}, "value_error", ("max_steps", "libero_goal")),
    ],
    ids=["unknown task", "task twice", "unknown state", "state twice", "suite without a limit"],
)
def test_rejects_impossible_plans(changes: dict[str, Any], code: str, values: tuple[object, ...]) -> None:
    with refused(code, *values):
        plan_episodes(settings(**changes), KNOWN)


def test_each_chunk_has_its_own_noise_seed() -> None:
    chosen = settings(episodes_per_task=12)
    planned = plan_episodes(chosen, KNOWN)
    seeds = [noise_seed(chosen, each, chunk) for each in planned for chunk in range(30)]
    assert len(set(seeds)) == len(seeds) == 3 * 12 * 30
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({noise_seed(settings(eval_seed=seed), planned[0], 0) for seed in range(50)}) == 50


def test_seeds_depend_only_on_the_episode() -> None:
    """Seeds do not depend on which other episodes are played, nor on the batch."""
    few = settings(tasks=(1,), episodes_per_task=2, batch=4)
    one = plan_episodes(few, KNOWN)[1]
    same = next(each for each in plan_episodes(settings(), KNOWN) if each.key == one.key)
    assert (one.simulator_seed, noise_seed(few, one, 3)) == (same.simulator_seed, noise_seed(settings(), same, 3))
    assert noise_seed(settings(), plan_episodes(settings(), KNOWN)[0], 0) == 7657459768264447920


def test_shared_noise_depends_only_on_the_chunk_number() -> None:
    shared = settings(per_episode_seed=False)
    planned = plan_episodes(shared, KNOWN)
    assert len({noise_seed(shared, each, 2) for each in planned}) == 1
    assert noise_seed(shared, planned[0], 2) != noise_seed(shared, planned[0], 3)


def test_players_keep_their_task_and_play_each_episode_once() -> None:
    planned = plan_episodes(settings(), KNOWN)
    schedule = StickyQueue(planned, lambda episode: episode.key[:2])
    held: list[tuple[str, int] | None] = [None, None]
    played, changes, first = [], 0, []
    while any(taken := [schedule.take(held[player]) for player in (0, 1)]):
        for player, episode in enumerate(taken):
            if episode is not None:
                played.append(episode.key)
                changes += held[player] != episode.key[:2]
                held[player] = episode.key[:2]
        first = first or [each.task.index for each in taken if each]
    assert Counter(played) == Counter(each.key for each in planned)
    assert len(set(first)) == 2
    assert changes == 4  # three tasks are built once, the last one by the second player as well
