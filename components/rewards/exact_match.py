"""The completion is the answer, word for word."""

from __future__ import annotations

import unicodedata
from typing import Any, ClassVar

from pydantic import Field, NonNegativeFloat

from armature.components.contracts.value_text import value_text
from armature.components.rewards.extract import ExtractingSettings, extracted
from armature.components.rewards.number import read_number
from armature.components.rewards.reward import BadAnswer, Reward, RewardInput

KEPT = "%$€£¥+-#@&_"
"""Punctuation and signs at the ends of a text that mean something there."""


class ExactMatchSettings(ExtractingSettings):
    """1 if the completion is one of the accepted answers, else 0. Unicode is normalized (NFKC), and whitespace."""

    ignore_case: bool = Field(True, description="RED is red.")
    ignore_punctuation: bool = Field(True, description='"Red." is Red: at both ends, not within.')
    relative: NonNegativeFloat = Field(
        0.0,
        description="Where answer and completion are both nothing but a number: largest difference that is right, as a "
        "share of the answer. 0.05 gives the relaxed accuracy of ChartQA.",
    )


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
