"""The process in which one reward grades, started as `python -m armature.components.rewards.worker`."""

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
"""A reply to `IsolatedReward`: the reward of a completion, or the reason and the detail of a failure."""


class CpuTimeSpent(BaseException):
    """A grade has used up its CPU time. It derives from BaseException because libraries catch Exception."""


class RewardHandler:
    """Answers the requests of `IsolatedReward`. The reward is made when the process starts."""

    def __init__(self, settings: Mapping[str, Any], folder: str) -> None:
        name = settings["name"]
        validated = own_settings(name, settings)
        self._reward: Reward[NamedReward] = REWARDS[name](validated, Path(folder))
        self._cpu_seconds = validated.timeout if isinstance(validated, CpuBoundSettings) else 0.0  # 0: no limit
        self._sources = sources_of(validated)

    def begin(self) -> dict[str, str]:
        """Return the digests and versions of the reward's code (see `sources_of`), so that the caller notices when the
        code changes."""
        return self._sources

    def check(self, answer: Any) -> Answer:
        """Return 0.0 if the answer is valid for the reward; see `Reward.check`."""
        try:
            self._reward.check(answer)
        except RolloutFailed as failed:
            return failed.reason, failed.detail
        return 0.0

    def grade(self, completion: str, answer: Any, row: Mapping[str, Any]) -> Answer:
        """Return the reward of a completion, or the reason of a failure. A completion whose grade takes too much CPU
        time gets 0."""
        try:
            with cpu_limit(self._cpu_seconds):
                return finite_reward(self._reward.grade(RewardInput(completion, answer, row)))
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
    """Raise `CpuTimeSpent` inside the block after `seconds` of CPU time, and again each second. 0 sets no limit.

    CPU time and not wall-clock time is limited: on a busy machine a correct completion would get 0.
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


def finite_reward(value: object) -> float:
    """Return the value as a finite float.

    Bools, NumPy numbers, and tensors and arrays without dimensions count as numbers; a text with a number does not.

    Raises:
        RolloutFailed: `reward_invalid`.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
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
