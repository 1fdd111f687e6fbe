"""Multiple choice: which letter a completion chooses."""

from __future__ import annotations

import re
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from pydantic import Field

from components.rewards.extract import ExtractingSettings, extracted, last_boxed
from components.rewards.reward import BadAnswer, Reward, RewardInput

_WRAPPED = r"(?:\\(?:text|textbf|mathrm|mathbf)\s?\{|[(\[{*_\"'`$])"
_ALONE = re.compile(rf"\W{{0,8}}{_WRAPPED}{{0,4}}([A-Za-z])(?:\W*|[^\w\s'][\s\S]*)")
_ANNOUNCED = re.compile(
    rf"\b(?:answer|option|choice)\b\W{{0,4}}(?:is|be|:|=)?\W{{0,4}}{_WRAPPED}{{0,4}}([A-Za-z])(?![\w'])", re.IGNORECASE
)
_PARENTHESIZED = re.compile(r"\(([A-Za-z])\)")
_UPPER_CASE = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")
_ARTICLE = re.compile(r"\s+[a-z]")


class ChoiceSettings(ExtractingSettings):
    """1 if the letter that is chosen is the answer's, else 0."""

    choices: int = Field(4, ge=2, le=26, description="How many letters there are: 4 for A to D.")


class Choice(Reward[ChoiceSettings]):
    r"""Reads B, (B), B. because ..., the answer is B, \boxed{B}; two letters without any of that are no choice.

    The answer is a letter, or a whole number that counts from 0.
    """

    Settings: ClassVar = ChoiceSettings

    def __init__(self, settings: ChoiceSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._letters = ascii_uppercase[: settings.choices]

    def check(self, answer: Any) -> None:
        self._right(answer)

    def grade(self, given: RewardInput) -> float:
        right = self._right(given.answer)
        said = extracted(given.completion, self._settings.extract)
        return float(said is not None and chosen_letter(said, self._letters) == right)

    def _right(self, answer: Any) -> str:
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(self._letters):
            return self._letters[answer]
        letter = chosen_letter(answer, self._letters) if isinstance(answer, str) else None
        if letter is None:
            raise BadAnswer(f"{answer!r:.200} is none of {self._letters}, nor a number below {len(self._letters)}")
        return letter


def chosen_letter(text: str, letters: str) -> str | None:
    """The upper-case letter that `text` chooses, None where it chooses none or several. Takes linear time."""
    text = text.strip()
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed
    if (alone := _ALONE.fullmatch(text)) and not _is_article(alone):
        return _one_of(letters, sorted({letter.upper() for letter in [alone.group(1), *_PARENTHESIZED.findall(text)]}))
    announced = [match.group(1).upper() for match in _ANNOUNCED.finditer(text) if not _is_article(match)]
    if announced:
        return _one_of(letters, announced[-1:])
    for pattern in (_PARENTHESIZED, _UPPER_CASE):
        found = {match.group(1).upper() for match in pattern.finditer(text) if not _is_article(match)}
        if chosen := sorted(found & set(letters)):
            return _one_of(letters, chosen)
    return None


def _is_article(match: re.Match[str]) -> bool:
    """Whether it is the word in "a dog"."""
    return match.group(1) in "aA" and bool(_ARTICLE.match(match.string, match.end(1)))


def _one_of(letters: str, found: list[str]) -> str | None:
    return found[0] if len(found) == 1 and found[0] in letters else None
