"""The `Reward` base class, its settings and inputs, and the helpers that pick the graded part of a completion."""

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
from armature.components.contracts.errors import InvalidName, RolloutFailed
from armature.components.contracts.settings import InvalidTable, Settings
from armature.components.rewards import REWARDS

# --- Settings of a reward: name, weight and arguments ---


class NamedReward(Settings):
    """The settings that all rewards have."""

    name: str
    """Registered name: exact_match, choice, number, function, ..."""
    weight: float = 1.0
    """Factor of this reward in the weighted sum; 0 records the reward without training on it."""
    label: str = Field("", max_length=100)
    """Name in tables and curves, to tell two rewards with the same `name` apart; empty: use `name`."""

    @property
    def part(self) -> str:
        """Key under which a turn's `reward_parts` has this reward: the label, or the name if there is no label."""
        return self.label or self.name


class RewardSettings(NamedReward):
    """A reward's name with all arguments of its settings class. Missing and unknown arguments are errors.

    Example:
        >>> settings = RewardSettings(name="choice", choices=3)
        >>> settings.model_dump()["extract"]  # a default of `ChoiceSettings`
        'all'
    """

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _add_defaults_of_the_reward(cls, values: Any) -> Any:
        name = values.get("name", "") if isinstance(values, Mapping) else None
        if name == "":
            names = [key for key in values if key in REWARDS]  # function = "rewards:close", without name = "function"
            raise InvalidName(
                "Field required",
                code="reward_name_missing",
                remedy=f'write name = "{names[0]}"' if names else f"known: {', '.join(REWARDS)}",
            )
        if not isinstance(name, str):
            return values
        return own_settings(name, values).model_dump(mode="json")

    def own(self) -> Any:
        """Return these values as an instance of the reward's own settings class, such as `ChoiceSettings`."""
        return own_settings(self.name, self.model_dump())


def own_settings(name: str, values: Mapping[str, Any]) -> NamedReward:
    """Validate `values` with the settings class of the reward `name`.

    Raises:
        InvalidName: no reward has that name, or an optional dependency of the reward is not installed.
        InvalidTable: the settings class rejects the values.
    """
    model: type[NamedReward] = REWARDS[name].Settings
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidTable(error, model) from error


@dataclass(frozen=True)
class RewardInput:
    """The inputs of one grade: a completion, the task's answer and the task's row of the dataset.

    `answer` and `row` are JSON values; `row` has no images.
    """

    completion: str
    answer: Any
    row: Mapping[str, Any]


class IsolatedSettings(NamedReward):
    """The settings of a reward that runs in its own process."""

    timeout: PositiveFloat = Field(10.0, le=3600)
    """Seconds that one grade may take. A grade that takes longer fails its rollout."""

    @property
    def patience(self) -> float:
        """Seconds of wall-clock time after which the reward's process is ended."""
        return self.timeout


class CpuBoundSettings(IsolatedSettings):
    """Settings of a reward that runs only this project's code, so that its CPU time depends only on the completion."""

    timeout: PositiveFloat = Field(10.0, le=3600)
    """Seconds of CPU time that one grade may take. A completion that needs more gets reward 0. A process that returns
    no grade within four times as many seconds of wall-clock time is ended, and the rollout fails."""

    @property
    def patience(self) -> float:
        return 4 * self.timeout


class BadAnswer(RolloutFailed):
    """The reward cannot compare any completion with the row's answer: a problem in the dataset."""

    def __init__(self, detail: str) -> None:
        super().__init__("bad_answer", detail)


SettingsT = TypeVar("SettingsT", bound=NamedReward)


class Reward(ABC, Generic[SettingsT]):
    """A way to grade completions. A completion that cannot be parsed gets 0, so that the policy learns the format.

    `runs` says where `grade` is called: "here" (in the caller's process) is for rewards that are quick on every input.
    A reward that may hang or crash runs in a "process" of its own, and its settings derive from `IsolatedSettings`.

    Example:
        >>> class Short(Reward[NamedReward]):
        ...     def grade(self, inputs: RewardInput) -> float:
        ...         return float(len(inputs.completion) <= 10)
        >>> Short(NamedReward(name="short"), Path()).grade(RewardInput("red", answer="red", row={}))
        1.0
    """

    Settings: ClassVar[type[NamedReward]]
    runs: ClassVar[Literal["here", "process"]] = "here"

    def __init__(self, settings: SettingsT, folder: Path) -> None:
        """`folder` is the folder of the recipe: paths and modules that the settings name are relative to it."""
        self._settings = settings

    @staticmethod
    def sources(settings: Any) -> dict[str, str]:
        """Return the digests and versions, by name, of everything that affects a grade, except the settings and the
        code of the reward's module.

        Raises:
            ConfigurationError: a file or package is missing.
        """
        return {}

    @staticmethod
    def columns(settings: Any) -> tuple[str, ...]:
        """Return the names of the dataset's columns that `grade` needs, besides the answer."""
        return ()

    def check(self, answer: Any) -> None:
        """Check that completions can be compared with `answer`.

        Raises:
            BadAnswer: no completion can be compared with it.
        """
        return

    @abstractmethod
    def grade(self, inputs: RewardInput) -> float:
        """Return the reward of a completion.

        Raises:
            RolloutFailed: the reason is `bad_answer` if `check` would fail. Any other exception in a process of the
                reward becomes a RolloutFailed with the reason `reward_error`.
        """


# --- Code and files that grades depend on ---


def sources_of(settings: NamedReward) -> dict[str, str]:
    """Return the digests and versions, by name, of the code and files that grades with these `settings` depend on.

    Raises:
        ConfigurationError: a file or package that the settings name is missing.
    """
    kind: type[Reward[NamedReward]] = REWARDS[settings.name]
    return {"code": code_digest(kind.__module__), **kind.sources(settings)}


# --- The graded part of a completion ---

EXTRACT = r"^(all|boxed|</?[A-Za-z_][\w.-]{0,63}>)$"
"""Pattern of the values of `extract`, which name a part of a completion."""
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
"""Ranges of Japanese, Chinese and Korean characters: these scripts put no space before a letter or a number."""
_SCRIPT_CHANGE = re.compile(rf"(?<=[{UNSPACED}])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])(?=[{UNSPACED}])")
_APOSTROPHES = str.maketrans("\u2018\u2019\u02bc", "'''")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)


class ExtractingSettings(NamedReward):
    """The settings of rewards that can grade a part of the completion."""

    extract: str = Field("all", pattern=EXTRACT)
    """Part of the completion that is graded. all: everything; boxed: the content of the last \\boxed{...}; <answer>:
    the text between the last such tag and its end tag; </think>: the text after the last such end tag. If the part
    is missing, the reward is 0."""


def extracted(completion: str, extract: str) -> str | None:
    r"""Return the part of `completion` that `extract` names (see `ExtractingSettings`), or None if it is missing.

    Takes linear time.

    Example:
        >>> extracted("<think>2 + 2</think> It is <answer>4</answer>.", "<answer>")
        '4'
        >>> extracted("no box here", "boxed") is None
        True
    """
    if extract == "all":
        return completion
    if extract == "boxed":
        return last_boxed(completion)
    if extract.startswith("</"):
        _, end_tag, rest = completion.rpartition(extract)
        return rest.strip() if end_tag else None
    before, end_tag, _ = completion.rpartition(f"</{extract[1:]}")
    _, start_tag, inside = before.rpartition(extract)
    return inside.strip() if end_tag and start_tag else None


def wrapped(answer: str, extract: str) -> str:
    """Return a completion of which `extracted` returns `answer`.

    Example:
        >>> wrapped("4", "<answer>"), wrapped("4", "boxed"), wrapped("4", "</think>"), wrapped("4", "all")
        ('<answer>4</answer>', '\\\\boxed{4}', '</think>4', '4')
    """
    if extract == "all":
        return answer
    if extract == "boxed":
        return f"\\boxed{{{answer}}}"
    return f"{extract}{answer}" + ("" if extract.startswith("</") else f"</{extract[1:]}")


def folded(text: str) -> str:
    """Normalize a text: Unicode NFKC, no invisible characters, plain apostrophes, and a space between a CJK character
    and a Latin letter or digit."""
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).translate(_APOSTROPHES)
    return _SCRIPT_CHANGE.sub(" ", text)


def last_boxed(completion: str) -> str | None:
    r"""Return the content of the \boxed{...} or \fbox{...} that closes last, or None.

    Escaped braces are text; other braces are counted.
    """
    opened: list[int | None] = []
    span = None
    for match in _BRACES.finditer(completion):
        token = match.group()
        if token == "}" and opened:
            start = opened.pop()
            if start is not None:
                span = start, match.start()
        elif token.startswith(("\\boxed", "\\fbox")):
            opened.append(match.end())
        elif token == "{":
            opened.append(None)
    return completion[slice(*span)].strip() if span else None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of `pattern` in `text`, or None if there is no match."""
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None
