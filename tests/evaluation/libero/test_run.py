from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from armature.components.contracts.robots import RobotObservation
from armature.components.evaluation.libero.journal import EpisodeOutcome, EvaluationJournal
from armature.components.evaluation.libero.run import Evaluation
from armature.components.evaluation.libero.schedule import EpisodeKey, plan_episodes
from tests.evaluation.libero.playground import TASKS, Homing, Plane, settings
from tests.refusals import refused

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


def test_the_game_is_worth_playing(alone: dict[EpisodeKey, EpisodeOutcome]) -> None:
    assert len(alone) == 21
    assert {outcome.success for outcome in alone.values()} == {True, False}
    assert all(outcome.steps == 23 for outcome in alone.values() if not outcome.success)


@pytest.mark.parametrize(("batch", "arenas"), [(4, 1), (4, 2), (3, 2), (40, 2)])
def test_results_depend_on_neither_batch_nor_processes(
    tmp_path: Path, alone: dict[EpisodeKey, EpisodeOutcome], batch: int, arenas: int
) -> None:
    policy = Homing()
    outcomes = play(tmp_path, [Plane() for _ in range(arenas)], policy, batch=batch)
    assert ends(outcomes) == ends(alone)
    assert max(policy.rows) <= policy.rows_per_pass
    assert sum(policy.rows) == sum(-(-outcome.steps // 4) for outcome in alone.values())


def test_a_lost_simulator_has_its_episodes_played_again(
    tmp_path: Path, alone: dict[EpisodeKey, EpisodeOutcome]
) -> None:
    plane = Plane(deaths=(2, 9, 30))
    outcomes = play(tmp_path, [plane], batch=1)
    assert ends(outcomes) == ends(alone)
    assert sum(outcome.lost for outcome in outcomes.values()) == 3
    shared = play(tmp_path / "shared", [Plane(deaths=(20,))], batch=4)
    assert ends(shared) == ends(alone)
    assert 1 <= sum(outcome.lost for outcome in shared.values()) <= 4


def test_episodes_that_always_fail_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    outcomes = play(tmp_path, [Plane(deaths=(1, 2, 3))], failed_episodes=1)
    failed = [outcome for outcome in outcomes.values() if outcome.failure]
    assert [(each.success, each.steps, each.lost) for each in failed] == [(False, 0, 3)]
    assert "the process of the plane died" in str(failed[0].failure)
    with refused("too_many_episodes_failed", 2, 1):
        play(tmp_path / "more", [Plane(deaths=range(1, 7))], failed_episodes=1)
    resumed = play(tmp_path, [Plane()], failed_episodes=1)
    assert not any(outcome.failure for outcome in resumed.values())


def test_a_state_that_is_not_finite_costs_its_episode_alone(
    tmp_path: Path, alone: dict[EpisodeKey, EpisodeOutcome]
) -> None:
    class Exploding(Plane):
        """Its physics fails in the first three attempts."""

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


def test_an_error_of_the_policy_ends_the_evaluation_and_the_rest_is_played_later(
    tmp_path: Path, alone: dict[EpisodeKey, EpisodeOutcome]
) -> None:
    with pytest.raises(MemoryError):
        play(tmp_path, [Plane(), Plane()], Counting(40), batch=4)
    kept = EvaluationJournal(tmp_path / "episodes.jsonl").read()
    assert 0 < len(kept) < 21
    with (tmp_path / "episodes.jsonl").open("ab") as file:
        file.write(b'{"key": ["libero_spatial", 0')
    plane = Plane()
    assert ends(play(tmp_path, [plane])) == ends(alone)
    assert plane.resets == 21 - len(kept)
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
def test_what_is_no_action_is_refused_with_its_place(
    tmp_path: Path, answer: NDArray[np.float32], code: str, shape: object
) -> None:
    with refused(code, shape, "libero_spatial task 0 episode 0 (initial state 0), chunk 2"):
        play(tmp_path, [Plane()], Counting(2, answer))
