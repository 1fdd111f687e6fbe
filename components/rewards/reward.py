"""What a reward is, and what it is given."""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from armature.components.artifacts.sources import code_digest
from armature.components.contracts.errors import RolloutFailed
from armature.components.contracts.settings import InvalidTable, Settings
from armature.components.rewards import REWARDS

# Which rewards, with which weights and arguments.


class NamedReward(Settings):
    """What every reward is told."""

    name: str
    """Registered name: exact_match, choice, number, function, ..."""
    weight: float = 1.0
    """What the reward is multiplied by in the sum; 0: it is only recorded."""
    label: str = Field("", max_length=100)
    """Its name in tables and curves, for two rewards of one name; empty: the name."""

    @property
    def part(self) -> str:
        """The key of its values among a turn's reward parts."""
        return self.label or self.name


class RewardSettings(NamedReward):
    """A reward, and beside its name the arguments of its own settings class: complete, and none that it lacks."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _with_the_reward_s_own_settings(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, Mapping) else None
        if not isinstance(name, str):
            return values
        return own_settings(name, values).model_dump(mode="json")

    def own(self) -> Any:
        """As the reward's own settings class."""
        return own_settings(self.name, self.model_dump())


def own_settings(name: str, values: Mapping[str, Any]) -> NamedReward:
    """
    Raises:
        ConfigurationError: no reward has that name, or an extra that it needs is not installed.
        InvalidTable: the values are not what its settings class takes.
    """
    model: type[NamedReward] = REWARDS[name].Settings
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidTable(error, model) from error


@dataclass(frozen=True)
class RewardInput:
    """A completion, and the task that it is for. `answer` and `row` are JSON; images are not among them."""

    completion: str
    answer: Any
    row: Mapping[str, Any]


class IsolatedSettings(NamedReward):
    """Of a reward in a process of its own."""

    timeout: PositiveFloat = Field(10.0, le=3600)
    """Seconds that one grade may take. The rollout of one that takes longer fails."""

    @property
    def patience(self) -> float:
        """Seconds by the clock after which the process is ended."""
        return self.timeout


class CpuBoundSettings(IsolatedSettings):
    """Of a reward whose code is ours: only the completion decides how long it takes."""

    timeout: PositiveFloat = Field(10.0, le=3600)
    """Seconds of CPU time that one grade may take. A completion that takes more is worth 0; a process that gives no
    grade for four times as long by the clock is ended, and the rollout fails."""

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


# What the grades of a reward depend on besides its settings.


def sources_of(own: NamedReward) -> dict[str, str]:
    """Digests and versions by name, of a reward with its own settings.

    Raises:
        ConfigurationError: something that it names is not there.
    """
    kind: type[Reward[NamedReward]] = REWARDS[own.name]
    return {"code": code_digest(kind.__module__), **kind.sources(own)}


# The part of a completion that is graded.

EXTRACT = r"^(all|boxed|</?[A-Za-z_][\w.-]{0,63}>)$"
"""What `extracted` takes."""
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
"""Japanese, Chinese and Korean, which put no space before a letter or a number."""
_SCRIPT_CHANGE = re.compile(rf"(?<=[{UNSPACED}])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])(?=[{UNSPACED}])")
_APOSTROPHES = str.maketrans("\u2018\u2019\u02bc", "'''")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)


class ExtractingSettings(NamedReward):
    """Of rewards that may look at a part of the completion alone."""

    extract: str = Field("all", pattern=EXTRACT)
    """What of the completion is graded: all; boxed: the last \\boxed{...}; <answer>: what is between the last such tag
    and its end; </think>: what follows the last of it. Where that is missing, the reward is 0."""


def extracted(completion: str, extract: str) -> str | None:
    """The part that `extract` names, see `ExtractingSettings`; None if it is missing. Takes linear time."""
    if extract == "all":
        return completion
    if extract == "boxed":
        return last_boxed(completion)
    if extract.startswith("</"):
        _, found, rest = completion.rpartition(extract)
        return rest.strip() if found else None
    before, found, _ = completion.rpartition(f"</{extract[1:]}")
    _, opened, inside = before.rpartition(extract)
    return inside.strip() if found and opened else None


def folded(text: str) -> str:
    """Return the text in one form (NFKC), without invisible characters, with spaces where its script changes."""
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).translate(_APOSTROPHES)
    return _SCRIPT_CHANGE.sub(" ", text)


def last_boxed(completion: str) -> str | None:
    r"""What is in the \boxed{...}, or \fbox{...}, that is closed last; escaped braces are text, others are counted."""
    opened: list[int | None] = []
    found = None
    for match in _BRACES.finditer(completion):
        token = match.group()
        if token == "}" and opened:
            start = opened.pop()
            if start is not None:
                found = start, match.start()
        elif token.startswith(("\\boxed", "\\fbox")):
            opened.append(match.end())
        elif token == "{":
            opened.append(None)
    return completion[slice(*found)].strip() if found else None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of `pattern`, None if there is none."""
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None
