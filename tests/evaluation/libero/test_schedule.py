from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from armature.components.evaluation.libero.schedule import noise_seed, plan_episodes
from armature.components.workers.pool import StickyQueue
from tests.evaluation.libero.playground import TASKS, settings
from tests.refusals import refused

KNOWN = {"libero_spatial": TASKS}


def test_every_initial_state_comes_once_before_any_comes_again() -> None:
    planned = plan_episodes(settings(episodes_per_task=12), KNOWN)
    for task in TASKS:
        states = [each.initial_state for each in planned if each.task == task]
        assert sorted(states[:5]) == sorted(states[5:10]) == [0, 1, 2, 3, 4]
        assert states[10:] == [0, 1]


def test_initial_states_are_those_that_are_named() -> None:
    planned = plan_episodes(settings(tasks=(1,), initial_states=(4, 1), episodes_per_task=5), KNOWN)
    assert [each.initial_state for each in planned] == [4, 1, 4, 1, 4]
    assert [each.repetition for each in planned] == [0, 0, 1, 1, 2]


def test_tasks_are_chosen_by_number() -> None:
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
def test_impossible_plan_is_refused(changes: dict[str, Any], code: str, values: tuple[object, ...]) -> None:
    with refused(code, *values):
        plan_episodes(settings(**changes), KNOWN)


def test_each_chunk_of_each_episode_has_noise_of_its_own() -> None:
    chosen = settings(episodes_per_task=12)
    planned = plan_episodes(chosen, KNOWN)
    seeds = [noise_seed(chosen, each, chunk) for each in planned for chunk in range(30)]
    assert len(set(seeds)) == len(seeds) == 3 * 12 * 30
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({noise_seed(settings(eval_seed=seed), planned[0], 0) for seed in range(50)}) == 50


def test_seeds_hang_on_the_episode_alone() -> None:
    """Not on which others are played, nor on how many at once."""
    few = settings(tasks=(1,), episodes_per_task=2, batch=4)
    one = plan_episodes(few, KNOWN)[1]
    same = next(each for each in plan_episodes(settings(), KNOWN) if each.key == one.key)
    assert (one.simulator_seed, noise_seed(few, one, 3)) == (same.simulator_seed, noise_seed(settings(), same, 3))
    assert noise_seed(settings(), plan_episodes(settings(), KNOWN)[0], 0) == 7657459768264447920


def test_without_per_episode_seeds_the_noise_hangs_on_the_chunk_alone() -> None:
    shared = settings(per_episode_seed=False)
    planned = plan_episodes(shared, KNOWN)
    assert len({noise_seed(shared, each, 2) for each in planned}) == 1
    assert noise_seed(shared, planned[0], 2) != noise_seed(shared, planned[0], 3)


def test_a_player_keeps_its_task_and_each_episode_is_played_once() -> None:
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
