"""Who is answered together: calls of `rows`, waited for while others play."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from components.contracts.robots import RobotObservation
from components.evaluation.libero.batching import InferenceQueue

SEEN = RobotObservation({}, np.zeros(1, np.float32), "")


def test_a_call_that_is_not_full_waits_for_players_that_play_and_for_no_others() -> None:
    calls: list[list[int]] = []

    def predict(observations: Sequence[RobotObservation], seeds: list[int]) -> list[int]:
        calls.append(sorted(seeds))
        time.sleep(0.4)
        return [seed * 10 for seed in seeds]

    queue = InferenceQueue[int](predict, rows=2)
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
