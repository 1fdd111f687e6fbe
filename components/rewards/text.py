"""Rewards for the text of a completion: an exact match, a regular expression, its length and its tags."""

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

# --- Exact match ---

MEANINGFUL_PUNCTUATION = "%$€£¥+-#@&_"
"""Characters that are not stripped from the ends of a text because they change its meaning."""


class ExactMatchSettings(ExtractingSettings):
    """The reward is 1 if the completion equals an accepted answer after normalization of Unicode (NFKC) and whitespace,
    else 0."""

    ignore_case: bool = True
    """Compare without case: RED equals red."""
    ignore_punctuation: bool = True
    """Ignore punctuation at both ends of a text: "Red." equals Red. Punctuation within the text counts."""
    relative: NonNegativeFloat = 0.0
    """Largest accepted difference as a fraction of the answer, if answer and completion are both just a number. 0.05
    gives the relaxed accuracy of ChartQA."""


class ExactMatch(Reward[ExactMatchSettings]):
    """Compare the completion with the answer: a text, a number, true or false, or a list of accepted ones."""

    Settings: ClassVar = ExactMatchSettings

    def check(self, answer: Any) -> None:
        self._accepted(answer)

    def grade(self, inputs: RewardInput) -> float:
        accepted = self._accepted(inputs.answer)
        text = extracted(inputs.completion, self._settings.extract)
        return float(text is not None and (self._normalized(text) in accepted or self._near(text, inputs.answer)))

    def _near(self, text: str, answer: Any) -> bool:
        share = self._settings.relative
        number = read_number(text, "only", 0.01) if share else None
        if number is None:
            return False
        rights = [read_number(accepted, "only", 0.01) for accepted in accepted_texts(answer)]
        return any(abs(number - right) <= share * abs(right) for right in rights if right is not None)

    def _accepted(self, answer: Any) -> set[str]:
        return {self._normalized(text) for text in accepted_texts(answer)}

    def _normalized(self, text: str) -> str:
        return normalized(
            text, ignore_case=self._settings.ignore_case, ignore_punctuation=self._settings.ignore_punctuation
        )


def accepted_texts(answer: Any) -> list[str]:
    """Return the accepted answers of a row as texts. `answer` is one text or number, or a list of them.

    Raises:
        BadAnswer: there is no answer, or an answer is empty or neither a text nor a number.
    """
    answers = answer if isinstance(answer, list | tuple) else [answer]
    try:
        texts = [value_text(each) for each in answers]
    except ValueError:
        texts = []
    if not texts:
        raise BadAnswer(f"{answer!r:.200} is not a text, a number, or a list of texts and numbers")
    if not all(text.strip() for text in texts):
        raise BadAnswer("the answer is empty")
    return texts


def normalized(text: str, *, ignore_case: bool = True, ignore_punctuation: bool = True) -> str:
    """Normalize a text, so that equivalent texts compare equal: Unicode (NFKC), whitespace, and optionally case and the
    punctuation at both ends.

    Example:
        >>> normalized(" The  Red House. ")
        'the red house'
    """
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
    if start and text[start - 1] == "." and text[start : start + 1].isdigit():  # keep the point of .5
        start -= 1
    return text[start:end].strip()


def _is_punctuation(character: str) -> bool:
    category = unicodedata.category(character)
    return character.isspace() or (category[0] == "P" and character not in MEANINGFUL_PUNCTUATION)


# --- A regular expression ---


class RegexSettings(ExtractingSettings, CpuBoundSettings):
    """Without `group`, the reward is 1 if the pattern matches. With `group`, it is 1 if the group's text in the last
    match equals the answer. Else it is 0."""

    pattern: str = Field(max_length=10_000)
    """Python regular expression, searched anywhere in the text."""
    group: int | str | None = None
    """Number or name of the group that is compared with the answer as by exact_match; unset: the answer is not used."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern

    @field_validator("group")
    @classmethod
    def _check_group(cls, group: int | str | None, info: Any) -> int | str | None:
        if "pattern" in info.data and group is not None:
            pattern = re.compile(info.data["pattern"])
            if group not in (pattern.groupindex if isinstance(group, str) else range(pattern.groups + 1)):
                raise ValueError("the pattern has no such group")
        return group


class Regex(Reward[RegexSettings]):
    """Search the completion with a regular expression; see `RegexSettings`."""

    Settings: ClassVar = RegexSettings
    runs = "process"

    def __init__(self, settings: RegexSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._pattern = re.compile(settings.pattern)

    def check(self, answer: Any) -> None:
        if self._settings.group is not None:
            accepted_texts(answer)

    def grade(self, inputs: RewardInput) -> float:
        group = self._settings.group
        accepted = [] if group is None else accepted_texts(inputs.answer)
        text = extracted(inputs.completion, self._settings.extract)
        if text is None:
            return 0.0
        if group is None:
            return float(self._pattern.search(text) is not None)
        match = last_match(self._pattern, text)
        captured = None if match is None else match.group(group)
        return float(captured is not None and normalized(captured) in map(normalized, accepted))


# --- The form of a completion: its length and its tags ---


class LengthSettings(ExtractingSettings):
    """The reward is 1 for lengths between the bounds. Outside, it is 0 or falls linearly to 0."""

    unit: Literal["characters", "words"] = "characters"
    """Unit of lengths. The limit on tokens is rollouts.sampling.max_tokens."""
    at_least: NonNegativeInt = 0
    """Shortest length with reward 1."""
    at_most: NonNegativeInt | None = None
    """Longest length with reward 1; unset: no limit."""
    slope: NonNegativeInt = 0
    """Number of units beyond a bound over which the reward falls from 1 to 0; 0: the reward is 0 beyond the bound."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.at_most is None and not self.at_least:
            raise ValueError("neither at_least nor at_most is set: every length would get reward 1")
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError(f"at_most = {self.at_most} is below at_least = {self.at_least}")
        return self


class Length(Reward[LengthSettings]):
    """Grade the length of the completion; the task's answer is not used. A part that `extract` does not find has length
    0."""

    Settings: ClassVar = LengthSettings

    def grade(self, inputs: RewardInput) -> float:
        text = extracted(inputs.completion, self._settings.extract) or ""
        length = len(text.split()) if self._settings.unit == "words" else len(text)
        beyond = max(self._settings.at_least - length, 0)
        if self._settings.at_most is not None:
            beyond = max(beyond, length - self._settings.at_most)
        return max(0.0, 1.0 - beyond / self._settings.slope) if self._settings.slope else float(beyond == 0)


class FormatTagsSettings(NamedReward):
    """The reward is 1 if the completion consists of these tags in this order, each once and not empty, else 0."""

    tags: tuple[str, ...] = Field(("think", "answer"), min_length=1, max_length=20)
    """Names of the tags."""
    first_is_open: bool = False
    """Set if the prompt already ends with the first start tag, as chat templates of some thinking models do."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for tag in self.tags:
            if not tag or not tag.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"{tag!r:.100} is not the name of a tag; write answer for <answer>")
        if len(set(self.tags)) < len(self.tags):
            raise ValueError("a tag is named twice")
        return self


class FormatTags(Reward[FormatTagsSettings]):
    """Grade the tags of the completion; the task's answer is not used."""

    Settings: ClassVar = FormatTagsSettings

    def grade(self, inputs: RewardInput) -> float:
        text = f"<{self._settings.tags[0]}>" * self._settings.first_is_open + inputs.completion
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
