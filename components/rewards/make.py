"""Make the rewards of a recipe, and run those in processes that may hang or crash."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Protocol

from pydantic import Field, StrictStr, TypeAdapter

from armature.components.contracts.errors import ConfigurationError, RolloutFailed
from armature.components.machine.project import VARIABLE as PROJECT
from armature.components.machine.workers.channel import IdleWorkerLost, WorkerError
from armature.components.machine.workers.queue import WorkerQueue
from armature.components.machine.workers.worker import Worker, make_worker
from armature.components.rewards import REWARDS
from armature.components.rewards.callables import CallableReward
from armature.components.rewards.reward import (
    BadAnswer,
    IsolatedSettings,
    NamedReward,
    Reward,
    RewardInput,
    RewardSettings,
    sources_of,
)

# --- Rewards in their own processes. A process that hangs or dies fails one rollout; a new one grades the next. ---

WORKER = "armature.components.rewards.worker"
START_SECONDS = 120.0
"""Seconds that a reward's process may take to start and to import its modules."""
MOST_BYTES = 2**20
"""Largest accepted reply of a reward's process to one request, in bytes."""

Reason = Annotated[str, Field(strict=True, pattern="^[a-z][a-z0-9_]{0,63}$")]
GRADE: TypeAdapter[float | tuple[str, str]] = TypeAdapter(
    Annotated[float, Field(strict=True, allow_inf_nan=False)] | tuple[Reason, StrictStr]
)
"""A process's reply to a request for a grade: a finite reward, or the reason and the details of a failure."""
SOURCES = TypeAdapter(dict[StrictStr, StrictStr])


class IsolatedReward:
    """A reward that runs in up to `processes` processes, which end when this object is closed or garbage-collected.

    Safe to share between threads and event loops. Requests wait for a free process in their order of arrival; the
    waiting time does not count towards `timeout`.
    """

    def __init__(self, settings: IsolatedSettings, folder: Path, processes: int) -> None:
        self._timeout, self._part = settings.patience, settings.part
        self.weights = {settings.part: settings.weight}
        place = str(folder.resolve())
        arguments, env = {"settings": settings.model_dump(mode="json"), "folder": place}, {PROJECT: place}
        workers = [
            make_worker(WORKER, arguments, timeout=settings.patience, env=env, most_bytes=MOST_BYTES)
            for _ in range(processes)
        ]
        self._beginning = Lock()
        self._sources: dict[str, str] = {}
        closed = RolloutFailed("reward_died", "the rewards are closed")
        self._queue = WorkerQueue(workers, f"reward {settings.part}", closed)
        self.close = self._queue.close

    def begin(self) -> Future[None]:
        """Start a process of the reward. The future ends when it is ready, and raises ConfigurationError if the reward
        cannot be made."""
        return self._queue.submit(self._begin)

    def check(self, answer: Any) -> None:
        """Check in a process that completions can be compared with `answer`; see `Reward.check`."""
        self._queue.submit(lambda worker: self._ask(worker, "check", answer)).result()

    async def grade(self, inputs: RewardInput) -> dict[str, float]:
        """Return the reward of a completion, in a dictionary under the reward's label.

        Raises:
            RolloutFailed: `bad_answer`, `reward_error`, `reward_invalid`, `reward_timeout` or `reward_died`.
        """
        arguments = (inputs.completion, inputs.answer, dict(inputs.row))
        graded = self._queue.submit(lambda each: self._ask(each, "grade", *arguments))
        return {self._part: await asyncio.wrap_future(graded)}

    def _ask(self, worker: Worker, method: str, *arguments: Any) -> float:
        try:
            try:
                self._begin(worker)
                grade = worker.call(method, *arguments, reply=GRADE)
            except IdleWorkerLost:  # an earlier completion killed the process: this one gets a new one
                self._begin(worker)
                grade = worker.call(method, *arguments, reply=GRADE)
        except ConfigurationError as error:  # the reward's code or files have changed since the run began
            raise RolloutFailed("reward_error", str(error)) from error
        except WorkerError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise RolloutFailed("reward_timeout", f"no grade within {self._timeout:g} s") from error
            raise RolloutFailed("reward_died", error.what) from error
        if isinstance(grade, tuple):
            raise RolloutFailed(*grade)
        return grade

    def _begin(self, worker: Worker) -> None:
        """Start the worker's process if it is not running.

        Raises:
            ConfigurationError: the reward cannot be made, or its code has changed since the first process started.
        """
        if worker.alive:
            return
        sources = worker.call("begin", reply=SOURCES, timeout=START_SECONDS)
        with self._beginning:
            self._sources = self._sources or sources
        if sources != self._sources:
            worker.close()
            raise ConfigurationError(
                "the code of the reward has changed since the run began",
                code="reward_code_changed",
                remedy="start the run again to use the new one",
            )


class Grader(Protocol):
    """The interface through which `Rewards` calls a reward: one in this process, one in other processes, or a judge.

    It is safe to share between threads and event loops.
    """

    weights: dict[str, float]
    """Factors of the rewards in the weighted sum, by the labels that `grade` returns."""

    def check(self, answer: Any) -> None:
        """Check that completions can be compared with `answer`; see `Reward.check`."""

    async def grade(self, inputs: RewardInput) -> Mapping[str, float]:
        """Return the rewards of a completion by label. Raises RolloutFailed."""

    def close(self) -> object:
        """End the processes and connections of the reward."""


class ImmediateReward:
    """A reward that grades in the caller's process."""

    def __init__(self, reward: Reward[NamedReward], settings: NamedReward) -> None:
        self._reward, self._part = reward, settings.part
        self.weights = {settings.part: settings.weight}

    def check(self, answer: Any) -> None:
        self._reward.check(answer)

    async def grade(self, inputs: RewardInput) -> dict[str, float]:
        return {self._part: self._reward.grade(inputs)}

    def close(self) -> None:
        pass


class Rewards:
    """All rewards of a recipe. Safe to share between threads and event loops.

    Attributes:
        weights: factors of the weighted sum, by the labels that `grade` returns.
    """

    def __init__(self, rewards: Mapping[str, Grader]) -> None:
        self._rewards = dict(rewards)
        self.weights = {part: weight for reward in rewards.values() for part, weight in reward.weights.items()}

    def check(self, answer: Any) -> None:
        """Check that every reward can compare completions with `answer`.

        Raises:
            RolloutFailed: `bad_answer`: a reward cannot compare any completion with `answer`.
        """
        for name, reward in self._rewards.items():
            try:
                reward.check(answer)
            except RolloutFailed as failed:
                raise RolloutFailed(failed.reason, f"{name}: {failed.detail}") from failed

    async def grade(self, inputs: RewardInput) -> dict[str, float]:
        """Return the finite rewards of a completion by label.

        Raises:
            RolloutFailed: a reward failed; if several did, the first one in the recipe gives the reason.
        """
        grading = [self._graded(name, reward, inputs) for name, reward in self._rewards.items()]
        values: dict[str, float] = {}
        for graded in await asyncio.gather(*grading, return_exceptions=True):
            if isinstance(graded, BaseException):
                raise graded
            values |= graded
        return values

    def close(self) -> None:
        """End processes and connections of the rewards; grades in flight fail."""
        for reward in self._rewards.values():
            reward.close()

    async def _graded(self, name: str, reward: Grader, inputs: RewardInput) -> Mapping[str, float]:
        try:
            return await reward.grade(inputs)
        except RolloutFailed as failed:
            raise RolloutFailed(failed.reason, f"{name}: {failed.detail}") from failed


def make_rewards(
    settings: Sequence[RewardSettings], *, folder: Path, processes: int = 1, callables: Sequence[CallableReward] = ()
) -> Rewards:
    """Make the rewards of a recipe. Paths and modules in `settings` are relative to `folder`, the recipe's folder.

    A reward that runs in a process starts one process now, and uses up to `processes` of them. The rewards in
    `callables` are used as they are.

    Raises:
        ConfigurationError: there is no reward, two rewards have the same label, or a reward cannot be made.

    Example:
        >>> rewards = make_rewards([RewardSettings(name="exact_match", label="right")], folder=Path())
        >>> asyncio.run(rewards.grade(RewardInput("RED.", answer="red", row={})))
        {'right': 1.0}
        >>> rewards.close()
    """
    if not settings and not callables:
        raise ConfigurationError(
            "no reward is named", code="reward_missing", remedy='write [[rewards]] with name = "exact_match"'
        )
    refuse_equal_labels([*(each.part for each in settings), *(each.part for each in callables)])
    rewards: dict[str, Grader] = {}
    begun: list[Future[None]] = []
    try:
        for each in settings:
            kind, validated = REWARDS[each.name], each.own()
            if kind.runs == "here":
                rewards[each.part] = ImmediateReward(kind(validated, folder), validated)
            elif kind.runs == "process":
                rewards[each.part] = isolated = IsolatedReward(validated, folder, processes)
                begun.append(isolated.begin())
            else:
                rewards[each.part] = kind(validated, folder)
        for future in begun:
            future.result()
    except BaseException:
        for reward in rewards.values():
            reward.close()
        raise
    return Rewards({**rewards, **{each.part: each for each in callables}})


def refuse_missing_answer(settings: Sequence[RewardSettings], folder: Path, where: str, remedy: str) -> None:
    """Check that tasks without a right answer can be graded. Rewards that need a process are not checked.

    Args:
        where, remedy: parts of the error.

    Raises:
        ConfigurationError: a reward compares completions with the right answer.
    """
    for each in settings:
        try:
            if REWARDS[each.name].runs == "here":
                REWARDS[each.name](each.own(), folder).check(None)
        except BadAnswer as error:
            raise ConfigurationError(
                f"reward {each.part!r} needs the right answer, and the rows have none",
                code="answer_missing",
                where=where,
                remedy=remedy,
            ) from error


def refuse_equal_labels(labels: Sequence[str]) -> None:
    """Check that no two rewards have the same label, under which tables and curves show them.

    Raises:
        ConfigurationError: two labels are equal.
    """
    (label, count), *_ = Counter(labels).most_common()
    if count > 1:
        raise ConfigurationError(
            f"{count} rewards are called {label!r}",
            code="duplicate_reward",
            remedy="give each a label, or a function a name, of its own",
        )


def reward_sources(settings: Sequence[RewardSettings]) -> dict[str, str]:
    """Return the digests and versions, by name, of the code and files that grades depend on besides the settings.

    They are equal on all machines with the same code and the same files beside the recipe.

    Raises:
        ConfigurationError: a file or package that a reward names is missing.
    """
    return {
        f"reward {each.part} {name}": digest for each in settings for name, digest in sources_of(each.own()).items()
    }


def reward_columns(settings: Sequence[RewardSettings]) -> list[str]:
    """Return the names of the dataset's columns that the rewards need, besides the answer."""
    named = [REWARDS[each.name].columns(each.own()) for each in settings]
    return [column for columns in named for column in columns]
