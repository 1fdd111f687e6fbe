"""A regular expression that the completion matches, or that finds the answer in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from armature.components.rewards.exact_match import accepted_texts, normalized
from armature.components.rewards.extract import ExtractingSettings, extracted, last_match
from armature.components.rewards.reward import CpuBoundSettings, Reward, RewardInput


class RegexSettings(ExtractingSettings, CpuBoundSettings):
    """1 if the pattern is found, or if what a group of it found last is the answer; else 0."""

    pattern: str = Field(max_length=10_000, description="A regular expression of Python's, searched anywhere.")
    group: int | str | None = Field(
        None,
        description="Number or name of the group that is compared with the answer, as exact_match does; unset: the "
        "pattern alone counts.",
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern

    @field_validator("group")
    @classmethod
    def _is_in_the_pattern(cls, group: int | str | None, info: Any) -> int | str | None:
        if "pattern" in info.data and group is not None:
            found = re.compile(info.data["pattern"])
            if group not in (found.groupindex if isinstance(group, str) else range(found.groups + 1)):
                raise ValueError("the pattern has no such group")
        return group


class Regex(Reward[RegexSettings]):
    """Without a group the answer is not looked at."""

    Settings: ClassVar = RegexSettings
    runs = "process"

    def __init__(self, settings: RegexSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._pattern = re.compile(settings.pattern)

    def check(self, answer: Any) -> None:
        if self._settings.group is not None:
            accepted_texts(answer)

    def grade(self, given: RewardInput) -> float:
        group = self._settings.group
        accepted = [] if group is None else accepted_texts(given.answer)
        text = extracted(given.completion, self._settings.extract)
        if text is None:
            return 0.0
        if group is None:
            return float(self._pattern.search(text) is not None)
        found = last_match(self._pattern, text)
        said = None if found is None else found.group(group)
        return float(said is not None and normalized(said) in map(normalized, accepted))
