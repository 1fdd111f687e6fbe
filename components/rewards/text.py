"""Rewards for the text of a completion: the exact answer, a regular expression, the form."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, field_validator, model_validator

from armature.components.contracts.value_text import value_text
from armature.components.rewards.number import read_number
from armature.components.rewards.reward import (
    BadAnswer,
    CpuBoundSettings,
    ExtractingSettings,
    NamedReward,
    Reward,
    RewardInput,
    extracted,
    last_match,
)

# The completion is the answer, word for word.

KEPT = "%$€£¥+-#@&_"
"""Punctuation and signs at the ends of a text that mean something there."""


class ExactMatchSettings(ExtractingSettings):
    """1 if the completion is one of the accepted answers, else 0. Unicode is normalized (NFKC), and whitespace."""

    ignore_case: bool = True
    """RED is red."""
    ignore_punctuation: bool = True
    """"Red." is Red: at both ends, not within."""
    relative: NonNegativeFloat = 0.0
    """Where answer and completion are both nothing but a number: largest difference that is right, as a share of the
    answer. 0.05 gives the relaxed accuracy of ChartQA."""


class ExactMatch(Reward[ExactMatchSettings]):
    """The answer is a text, a number, true or false, or a list of those: any of them is right."""

    Settings: ClassVar = ExactMatchSettings

    def check(self, answer: Any) -> None:
        self._accepted(answer)

    def grade(self, given: RewardInput) -> float:
        accepted = self._accepted(given.answer)
        said = extracted(given.completion, self._settings.extract)
        return float(said is not None and (self._normalized(said) in accepted or self._near(said, given.answer)))

    def _near(self, said: str, answer: Any) -> bool:
        share = self._settings.relative
        number = read_number(said, "only", 0.01) if share else None
        if number is None:
            return False
        rights = [read_number(text, "only", 0.01) for text in accepted_texts(answer)]
        return any(abs(number - right) <= share * abs(right) for right in rights if right is not None)

    def _accepted(self, answer: Any) -> set[str]:
        return {self._normalized(text) for text in accepted_texts(answer)}

    def _normalized(self, text: str) -> str:
        return normalized(
            text, ignore_case=self._settings.ignore_case, ignore_punctuation=self._settings.ignore_punctuation
        )


def accepted_texts(answer: Any) -> list[str]:
    """The answers of a row, one or several, as texts.

    Raises:
        BadAnswer: there is none, or it is neither text nor a number.
    """
    answers = answer if isinstance(answer, list | tuple) else [answer]
    try:
        texts = [value_text(each) for each in answers]
    except ValueError:
        texts = []
    if not texts:
        raise BadAnswer(f"{answer!r:.200} is neither a text, nor a number, nor a list of those")
    if not all(text.strip() for text in texts):
        raise BadAnswer("the answer is empty")
    return texts


def normalized(text: str, *, ignore_case: bool = True, ignore_punctuation: bool = True) -> str:
    """What two texts that say the same have in common."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    if ignore_punctuation:
        text = _without_ends(text) or text
    return text.casefold() if ignore_case else text


def _without_ends(text: str) -> str:
    start, end = 0, len(text)
    while start < end and _is_punctuation(text[start]):
        start += 1
    while end > start and _is_punctuation(text[end - 1]):
        end -= 1
    if start and text[start - 1] == "." and text[start : start + 1].isdigit():  # .5 is a number
        start -= 1
    return text[start:end].strip()


def _is_punctuation(character: str) -> bool:
    return character.isspace() or (unicodedata.category(character)[0] == "P" and character not in KEPT)


# A regular expression that the completion matches, or that finds the answer in it.


class RegexSettings(ExtractingSettings, CpuBoundSettings):
    """1 if the pattern is found, or if what a group of it found last is the answer; else 0."""

    pattern: str = Field(max_length=10_000)
    """A regular expression of Python's, searched anywhere."""
    group: int | str | None = None
    """Number or name of the group that is compared with the answer, as exact_match does; unset: the pattern alone
    counts."""

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


# The form of a completion: its length, and its tags.


class LengthSettings(ExtractingSettings):
    """1 between the bounds; outside, 0, or falling linearly to 0."""

    unit: Literal["characters", "words"] = "characters"
    """What is counted. The bound on tokens is rollouts.sampling.max_tokens."""
    at_least: NonNegativeInt = 0
    """Shortest length that is worth 1."""
    at_most: NonNegativeInt | None = None
    """Longest length that is worth 1; unset: no bound."""
    slope: NonNegativeInt = 0
    """Over how many more, or fewer, the reward falls to 0; 0: at once, a hard bound."""

    @model_validator(mode="after")
    def _a_bound_that_can_be_met(self) -> Self:
        if self.at_most is None and not self.at_least:
            raise ValueError("neither at_least nor at_most is set: every length would be worth 1")
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError(f"at_most = {self.at_most} is below at_least = {self.at_least}")
        return self


class Length(Reward[LengthSettings]):
    """Does not look at the answer. What `extract` does not find has length 0."""

    Settings: ClassVar = LengthSettings

    def grade(self, given: RewardInput) -> float:
        text = extracted(given.completion, self._settings.extract) or ""
        length = len(text.split()) if self._settings.unit == "words" else len(text)
        beyond = max(self._settings.at_least - length, 0)
        if self._settings.at_most is not None:
            beyond = max(beyond, length - self._settings.at_most)
        return max(0.0, 1.0 - beyond / self._settings.slope) if self._settings.slope else float(beyond == 0)


class FormatTagsSettings(NamedReward):
    """1 if the completion is these tags, in this order, each once and with something in it, and nothing else."""

    tags: tuple[str, ...] = Field(("think", "answer"), min_length=1, max_length=20)
    """Names of the tags."""
    first_is_open: bool = False
    """The prompt ends with the first tag already, as templates of some thinking models do."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        for tag in self.tags:
            if not tag or not tag.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"{tag!r:.100} is not the name of a tag; write answer for <answer>")
        if len(set(self.tags)) < len(self.tags):
            raise ValueError("a tag is named twice")
        return self


class FormatTags(Reward[FormatTagsSettings]):
    """Does not look at the answer."""

    Settings: ClassVar = FormatTagsSettings

    def grade(self, given: RewardInput) -> float:
        text = f"<{self._settings.tags[0]}>" * self._settings.first_is_open + given.completion
        for tag in self._settings.tags:
            start, end = f"<{tag}>", f"</{tag}>"
            if text.count(start) != 1 or text.count(end) != 1:
                return 0.0
        for tag in self._settings.tags:
            before, _, rest = text.partition(f"<{tag}>")
            inside, closed, text = rest.partition(f"</{tag}>")
            if before.strip() or not closed or not inside.strip():
                return 0.0
        return float(not text.strip())
