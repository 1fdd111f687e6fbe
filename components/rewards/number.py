"""Numbers, and how near they are."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat

from components.rewards.extract import ExtractingSettings, extracted, last_match
from components.rewards.reward import BadAnswer, Reward, RewardInput

_SIGN = "[-+\N{MINUS SIGN}]"
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_TEN = r"(?:[eE]|\s?(?:[x*\N{MULTIPLICATION SIGN}]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{?\s?)"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>{_SIGN}\s?)?(?:"
    rf"\\[dt]?frac\s?\{{\s?(?P<over>{_SIGN}?{_PLAIN})\s?\}}\s?\{{\s?(?P<under>{_PLAIN})\s?\}}"
    rf"|(?P<whole>\d{{1,9}})\s(?P<part>\d{{1,9}})\s?/\s?(?P<parts>\d{{1,9}})(?![\w.])"
    rf"|(?P<plain>{_PLAIN})(?:{_TEN}(?P<power>{_SIGN}?\d{{1,4}})\}}?|\s?/\s?(?P<divisor>{_PLAIN}))?"
    r")(?P<percent>\s?\\?%)?"
)


class NumberSettings(ExtractingSettings):
    """1 if the number is at most max(absolute, relative * |answer|) from the answer, else 0."""

    absolute: NonNegativeFloat = Field(0.0, description="Largest difference that is right.")
    relative: NonNegativeFloat = Field(1e-9, description="Largest difference that is right, as a share of the answer.")
    take: Literal["last", "first", "only"] = Field(
        "last", description="Which number of the completion counts; only: there is nothing beside it."
    )
    percent: Literal["hundredths", "ignored"] = Field("hundredths", description="Whether 12% is 0.12 or 12.")


class Number(Reward[NumberSettings]):
    r"""Reads 1,234.5, -3, .5, 12%, 3/4, 1 1/2, \frac{3}{4}, 6.02e23 and 6.02 x 10^23.

    The answer is a number, a text that is one, or a list of those: any of them is right.
    """

    Settings: ClassVar = NumberSettings

    def check(self, answer: Any) -> None:
        self._accepted(answer)

    def grade(self, given: RewardInput) -> float:
        accepted = self._accepted(given.answer)
        text = extracted(given.completion, self._settings.extract)
        said = None if text is None else self._read(text, self._settings.take)
        return float(said is not None and any(self._near(said, right) for right in accepted))

    def _near(self, said: float, right: float) -> bool:
        return abs(said - right) <= max(self._settings.absolute, self._settings.relative * abs(right))

    def _read(self, text: str, take: Literal["last", "first", "only"]) -> float | None:
        return read_number(text, take, 0.01 if self._settings.percent == "hundredths" else 1.0)

    def _accepted(self, answer: Any) -> list[float]:
        answers = answer if isinstance(answer, list | tuple) else [answer]
        numbers = [self._read(each, "only") if isinstance(each, str) else _finite(each) for each in answers]
        found = [number for number in numbers if number is not None]
        if not found or len(found) != len(numbers):
            raise BadAnswer(f"{answer!r:.200} is not a number")
        return found


def read_number(text: str, take: Literal["last", "first", "only"], percent: float) -> float | None:
    """The number that `text` says; None: there is none, or it is not finite. Takes linear time.

    `percent`: what one percent is worth.
    """
    if take == "only":
        match = _NUMBER.fullmatch(text.strip().strip("$ ").removesuffix("."))
        return None if match is None else _value(match, percent)
    match = _NUMBER.search(text) if take == "first" else last_match(_NUMBER, text)
    return None if match is None else _value(match, percent)


def _value(match: re.Match[str], percent: float) -> float | None:
    groups = match.groupdict()
    if groups["over"]:
        value = _divided(_float(groups["over"]), _float(groups["under"]))
    elif groups["whole"]:
        value = _float(groups["whole"]) + _divided(_float(groups["part"]), _float(groups["parts"]))
    elif groups["power"]:
        value = _float(f"{groups['plain']}e{groups['power']}")
    elif groups["divisor"]:
        value = _divided(_float(groups["plain"]), _float(groups["divisor"]))
    else:
        value = _float(groups["plain"])
    if groups["sign"] and groups["sign"][0] != "+":
        value = -value
    return _finite(value * percent if groups["percent"] else value)


def _float(text: str) -> float:
    return float(text.replace(",", "").replace("\N{MINUS SIGN}", "-"))


def _divided(over: float, under: float) -> float:
    return over / under if under else math.nan


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
