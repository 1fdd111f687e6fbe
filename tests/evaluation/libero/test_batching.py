"""Who is answered together: calls of `rows`, waited for while others play."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from armature.components.contracts.errors import DataError
from armature.components.contracts.robots import RobotObservation
from armature.components.evaluation.libero.batching import InferenceQueue
from tests.refusals import refused

SEEN = RobotObservation({}, np.zeros(1, np.float32), "")


def test_a_call_that_is_not_full_waits_for_players_that_play_and_for_no_others() -> None:
    calls: list[list[int]] = []

    def predict(observations: Sequence[RobotObservation], seeds: list[int]) -> list[int]:
        calls.append(sorted(seeds))
        time.sleep(0.4)
        return [seed * 10 for seed in seeds]

    queue = InferenceQueue[int](predict, 2, lambda observation: observation)
    told: list[int] = []

    def player(number: int) -> Callable[[], None]:
        def play() -> None:
            for turn in range(3):
                time.sleep(0.05)  # its simulator
                told.append(queue.ask(SEEN, 3 * number + turn).result())

        return play

    queue.serve([player(0), player(1)])
    assert sorted(told) == [0, 10, 20, 30, 40, 50]
    together = [seeds for seeds in calls if len(seeds) == 2]
    assert len(together) >= 2, calls  # without waiting, the two take turns
    assert sum(map(len, calls)) == 6 and max(map(len, calls)) == 2


def test_observations_are_prepared_by_those_who_ask_while_others_are_answered() -> None:
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
    told: list[str] = []
    tasks = ("now", "later")
    queue.serve([lambda task=task: told.append(queue.ask(replace(SEEN, task=task), 0).result()) for task in tasks])
    assert sorted(told) == ["later, prepared", "now, prepared"]


def test_who_cannot_be_prepared_ends_it_for_all() -> None:
    def prepare(observation: RobotObservation) -> RobotObservation:
        raise DataError("the observation has no camera", code="no_camera")

    queue = InferenceQueue[int](lambda observations, seeds: seeds, 2, prepare)
    with refused("no_camera"):
        queue.serve([lambda: queue.ask(SEEN, 0).result() and None] * 3)
