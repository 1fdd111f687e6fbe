"""The process in which one reward grades. It is started as `python -m armature.components.rewards.worker`."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from armature.components.contracts.errors import ConfigurationError, RolloutFailed, said
from armature.components.machine.workers.channel import serve
from armature.components.rewards import REWARDS
from armature.components.rewards.reward import (
    CpuBoundSettings,
    NamedReward,
    Reward,
    RewardInput,
    own_settings,
    sources_of,
)

Answer = float | tuple[str, str]
"""What the reward gave, or reason and detail of its failure."""


class CpuTimeSpent(BaseException):
    """The grade has taken its CPU time. Not an Exception: libraries catch those."""


class RewardHandler:
    """Makes the reward with the first request."""

    def __init__(self, settings: Mapping[str, Any], folder: str) -> None:
        name = settings["name"]
        own = own_settings(name, settings)
        self._reward: Reward[NamedReward] = REWARDS[name](own, Path(folder))
        self._cpu_seconds = own.timeout if isinstance(own, CpuBoundSettings) else 0.0  # 0: no limit
        self._sources = sources_of(own)

    def begin(self) -> dict[str, str]:
        """What the grades depend on. Raises ConfigurationError if the reward cannot be made."""
        return self._sources

    def check(self, answer: Any) -> Answer:
        try:
            self._reward.check(answer)
        except RolloutFailed as failed:
            return failed.reason, failed.detail
        return 0.0

    def grade(self, completion: str, answer: Any, row: Mapping[str, Any]) -> Answer:
        try:
            with cpu_limit(self._cpu_seconds):
                return _finite(self._reward.grade(RewardInput(completion, answer, row)))
        except CpuTimeSpent:
            signal.setitimer(signal.ITIMER_PROF, 0)
            return 0.0
        except RolloutFailed as failed:
            return failed.reason, failed.detail
        except ConfigurationError:
            raise
        except Exception as error:
            return "reward_error", said(error)

    def close(self) -> None:
        pass


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `CpuTimeSpent` inside after so many seconds of CPU time, and again each second. 0 is no limit.

    The clock is no measure of a completion: a machine that is busy would make a right one worth 0.
    """

    def stop(*_: object) -> None:
        raise CpuTimeSpent

    if not seconds:
        yield
        return
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _finite(value: object) -> float:
    """True is 1. Numbers of numpy's are numbers, a text that says one is not."""
    if not isinstance(value, Real | np.bool_):
        shown = f" {value!r:.80}" if isinstance(value, str) else ""
        raise RolloutFailed("reward_invalid", f"a number was expected, not {type(value).__name__}{shown}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RolloutFailed("reward_invalid", f"the reward is {number}")
    return number


if __name__ == "__main__":
    serve(RewardHandler)
