"""From settings to rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Annotated, Any, Protocol, TypeVar
from weakref import finalize

from pydantic import Field, StrictStr, TypeAdapter

from armature.components.contracts.errors import ConfigurationError, RolloutFailed
from armature.components.machine.project import VARIABLE as PROJECT
from armature.components.machine.workers.channel import IdleWorkerLost, WorkerError
from armature.components.machine.workers.worker import Worker, make_worker
from armature.components.rewards import REWARDS
from armature.components.rewards.reward import (
    IsolatedSettings,
    NamedReward,
    Reward,
    RewardInput,
    RewardSettings,
    sources_of,
)

# Rewards in processes of their own, which may hang or die: that costs a rollout, and the next one finds another.

WORKER = "armature.components.rewards.worker"
START_SECONDS = 120.0
"""For a process to start and import what it needs, before its first grade."""
MOST_BYTES = 2**20
"""Of the answer to one request."""

Reason = Annotated[str, Field(strict=True, pattern="^[a-z][a-z0-9_]{0,63}$")]
GRADE: TypeAdapter[float | tuple[str, str]] = TypeAdapter(
    Annotated[float, Field(strict=True, allow_inf_nan=False)] | tuple[Reason, StrictStr]
)
"""A finite number, or why there is none: a reason and the details."""
SOURCES = TypeAdapter(dict[StrictStr, StrictStr])

ResultT = TypeVar("ResultT")
Job = tuple[Future[Any], Callable[[Worker], Any]]


class IsolatedReward:
    """The reward that `settings` describe, in up to `processes` processes, which end with it.

    Safe to share between threads and event loops. Grades wait for a process in the order in which they were asked for;
    that time does not count.
    """

    def __init__(self, settings: IsolatedSettings, folder: Path, processes: int) -> None:
        self._timeout, self._part = settings.patience, settings.part
        self.weights = {settings.part: settings.weight}
        place = str(folder.resolve())
        described, env = {"settings": settings.model_dump(mode="json"), "folder": place}, {PROJECT: place}
        workers = [
            make_worker(WORKER, described, timeout=settings.patience, env=env, most_bytes=MOST_BYTES)
            for _ in range(processes)
        ]
        self._beginning = Lock()
        self._sources: dict[str, str] = {}
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.close = finalize(self, _end, workers, self._jobs)
        for worker in workers:
            Thread(target=_work, args=(worker, self._jobs), name=f"reward {settings.part}", daemon=True).start()

    def begin(self) -> Future[None]:
        """Starts a process; the future raises ConfigurationError if the reward cannot be made."""
        return self._submit(self._begin)

    def check(self, answer: Any) -> None:
        self._submit(lambda worker: self._ask(worker, "check", answer)).result()

    async def grade(self, given: RewardInput) -> dict[str, float]:
        """
        Raises:
            RolloutFailed: `bad_answer`, `reward_error`, `reward_invalid`, `reward_timeout` or `reward_died`.
        """
        asked = (given.completion, given.answer, dict(given.row))
        return {self._part: await asyncio.wrap_future(self._submit(lambda each: self._ask(each, "grade", *asked)))}

    def _ask(self, worker: Worker, method: str, *arguments: Any) -> float:
        try:
            try:
                self._begin(worker)
                grade = worker.call(method, *arguments, reply=GRADE)
            except IdleWorkerLost:  # An earlier completion did that, and this one does not pay for it.
                self._begin(worker)
                grade = worker.call(method, *arguments, reply=GRADE)
        except ConfigurationError as error:  # what it is made of has changed since it was first made
            raise RolloutFailed("reward_error", str(error)) from error
        except WorkerError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise RolloutFailed("reward_timeout", f"no grade within {self._timeout:g} s") from error
            raise RolloutFailed("reward_died", error.what) from error
        if isinstance(grade, tuple):
            raise RolloutFailed(*grade)
        return grade

    def _begin(self, worker: Worker) -> None:
        """
        Raises:
            ConfigurationError: the reward cannot be made, or not any more as it was first.
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

    def _submit(self, work: Callable[[Worker], ResultT]) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        if not self.close.alive:
            future.set_exception(_closed())
        else:
            self._jobs.put((future, work))
        return future


def _work(worker: Worker, jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(worker))
            except BaseException as error:
                future.set_exception(error)
    worker.close()


def _end(workers: list[Worker], jobs: SimpleQueue[Job | None]) -> None:
    with suppress(Empty):
        while job := jobs.get_nowait():
            if job[0].set_running_or_notify_cancel():
                job[0].set_exception(_closed())
    for _ in workers:
        jobs.put(None)
    for worker in workers:  # whoever waits for a busy one sees its end
        worker.close()


def _closed() -> RolloutFailed:
    return RolloutFailed("reward_died", "the rewards are closed")


class Grader(Protocol):
    """A reward, wherever it runs. Safe to share between threads and event loops."""

    weights: dict[str, float]
    """Of the parts that `grade` gives."""

    def check(self, answer: Any) -> None: ...

    async def grade(self, given: RewardInput) -> Mapping[str, float]: ...

    def close(self) -> object: ...


class ImmediateReward:
    """One that runs here."""

    def __init__(self, reward: Reward[NamedReward], settings: NamedReward) -> None:
        self._reward, self._part = reward, settings.part
        self.weights = {settings.part: settings.weight}

    def check(self, answer: Any) -> None:
        self._reward.check(answer)

    async def grade(self, given: RewardInput) -> dict[str, float]:
        return {self._part: self._reward.grade(given)}

    def close(self) -> None:
        pass


class Rewards:
    """Several rewards of one completion. Safe to share between threads and event loops.

    `weights`: by the names that `grade` gives.
    """

    def __init__(self, rewards: Mapping[str, Grader]) -> None:
        self._rewards = dict(rewards)
        self.weights = {part: weight for reward in rewards.values() for part, weight in reward.weights.items()}

    def check(self, answer: Any) -> None:
        """
        Raises:
            RolloutFailed: `bad_answer`: a reward cannot compare any completion with `answer`.
        """
        for name, reward in self._rewards.items():
            try:
                reward.check(answer)
            except RolloutFailed as failed:
                raise RolloutFailed(failed.reason, f"{name}: {failed.detail}") from failed

    async def grade(self, given: RewardInput) -> dict[str, float]:
        """By name, finite numbers.

        Raises:
            RolloutFailed: see there for the reasons. Of several rewards that failed the first one says why.
        """
        grading = [self._graded(name, reward, given) for name, reward in self._rewards.items()]
        values: dict[str, float] = {}
        for graded in await asyncio.gather(*grading, return_exceptions=True):
            if isinstance(graded, BaseException):
                raise graded
            values |= graded
        return values

    def close(self) -> None:
        """End what grades elsewhere; grades in flight fail."""
        for reward in self._rewards.values():
            reward.close()

    async def _graded(self, name: str, reward: Grader, given: RewardInput) -> Mapping[str, float]:
        try:
            return await reward.grade(given)
        except RolloutFailed as failed:
            raise RolloutFailed(failed.reason, f"{name}: {failed.detail}") from failed


def make_rewards(settings: Sequence[RewardSettings], *, folder: Path, processes: int = 1) -> Rewards:
    """The rewards that `settings` describe; paths and modules that they name are below `folder`.

    Each that needs a process begins one now, and may have `processes` of them.

    Raises:
        ConfigurationError: there is none, two have the same label, or one cannot be made.
    """
    if not settings:
        raise ConfigurationError(
            "no reward is named", code="reward_missing", remedy='write [[rewards]] with name = "exact_match"'
        )
    (part, count), *_ = Counter(each.part for each in settings).most_common()
    if count > 1:
        raise ConfigurationError(
            f"{count} rewards are called {part!r}", code="duplicate_reward", remedy="give each a label of its own"
        )
    rewards: dict[str, Grader] = {}
    begun: list[Future[None]] = []
    try:
        for each in settings:
            kind, own = REWARDS[each.name], each.own()
            if kind.runs == "here":
                rewards[each.part] = ImmediateReward(kind(own, folder), own)
            elif kind.runs == "process":
                rewards[each.part] = isolated = IsolatedReward(own, folder, processes)
                begun.append(isolated.begin())
            else:
                rewards[each.part] = kind(own, folder)
        for future in begun:
            future.result()
    except BaseException:
        for reward in rewards.values():
            reward.close()
        raise
    return Rewards(rewards)


def reward_sources(settings: Sequence[RewardSettings]) -> dict[str, str]:
    """Digests and versions, by name, of what grades depend on besides the settings.

    They are the same on every machine that has the same code, and the same files beside the recipe.

    Raises:
        ConfigurationError: something that a reward names is not there.
    """
    found = {each.part: sources_of(each.own()) for each in settings}
    return {f"reward {part} {name}": digest for part, sources in found.items() for name, digest in sources.items()}


def reward_columns(settings: Sequence[RewardSettings]) -> list[str]:
    """Columns of a row that the rewards need, besides the answer."""
    named = [REWARDS[each.name].columns(each.own()) for each in settings]
    return [column for columns in named for column in columns]
