"""What a reward is, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field, PositiveFloat

from armature.components.contracts.failures import RolloutFailed
from armature.components.rewards.settings import NamedReward


@dataclass(frozen=True)
class RewardInput:
    """A completion, and the task that it is for. `answer` and `row` are JSON; images are not among them."""

    completion: str
    answer: Any
    row: Mapping[str, Any]


class IsolatedSettings(NamedReward):
    """Of a reward in a process of its own."""

    timeout: PositiveFloat = Field(
        10.0, le=3600, description="Seconds that one grade may take. The rollout of one that takes longer fails."
    )

    @property
    def patience(self) -> float:
        """Seconds by the clock after which the process is ended."""
        return self.timeout


class CpuBoundSettings(IsolatedSettings):
    """Of a reward whose code is ours: only the completion decides how long it takes."""

    timeout: PositiveFloat = Field(
        10.0,
        le=3600,
        description="Seconds of CPU time that one grade may take. A completion that takes more is worth 0; a process "
        "that gives no grade for four times as long by the clock is ended, and the rollout fails.",
    )

    @property
    def patience(self) -> float:
        return 4 * self.timeout


class BadAnswer(RolloutFailed):
    """The row's answer is not what this reward can compare with: an affair of the data, whatever the completion."""

    def __init__(self, detail: str) -> None:
        super().__init__("bad_answer", detail)


SettingsT = TypeVar("SettingsT", bound=NamedReward)


class Reward(ABC, Generic[SettingsT]):
    """One way to grade. A completion that cannot be read is worth nothing: that is for the policy to learn.

    `runs` says where: `here`, which is for what is quick whatever it is given, or in a `process`, which may hang or
    die; its settings are `IsolatedSettings`.
    """

    Settings: ClassVar[type[NamedReward]]
    runs: ClassVar[Literal["here", "process"]] = "here"

    def __init__(self, settings: SettingsT, folder: Path) -> None:
        """`folder` is the recipe's: paths and modules of the settings are below it."""
        self._settings = settings

    @staticmethod
    def sources(settings: Any) -> dict[str, str]:
        """Digests and versions, by name, of what grades depend on besides the settings and the class's own code.

        Raises:
            ConfigurationError: some of it is not there.
        """
        return {}

    @staticmethod
    def columns(settings: Any) -> tuple[str, ...]:
        """Columns of a row that grades need, besides the answer."""
        return ()

    def check(self, answer: Any) -> None:
        """
        Raises:
            BadAnswer: no completion can be compared with `answer`.
        """
        return

    @abstractmethod
    def grade(self, given: RewardInput) -> float:
        """
        Raises:
            RolloutFailed: `bad_answer`, see `check`; in a process also `reward_error`, which is what every other
                exception becomes there.
        """
