"""From settings to rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.failures import RolloutFailed
from armature.components.rewards import REWARDS
from armature.components.rewards.isolated import IsolatedReward
from armature.components.rewards.reward import Reward, RewardInput
from armature.components.rewards.settings import NamedReward, RewardSettings
from armature.components.rewards.sources import sources_of


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
