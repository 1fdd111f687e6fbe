"""A reward for numbers, within a tolerance of the answer."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat

from armature.components.rewards.reward import (
    UNSPACED,
    BadAnswer,
    ExtractingSettings,
    Reward,
    RewardInput,
    extracted,
    folded,
    last_match,
)

# Patterns that rewrite a text so that each number has one form: its minus sign is "-", its digits are not grouped, a
# fraction is written 1/2 and a power 2^3.
_SUPERSCRIPT = re.compile("[\u00b9\u00b2\u00b3\u2070\u2074-\u2079\u207a\u207b]+")
_AFTER_WHOLE = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")
"""Pattern of the place between a whole number and a fraction that is one character, such as between 1 and ½ in 1½."""
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2012\u2013\u2212\u02d7\u2796", "-"),
        **dict.fromkeys("\u2014\u2015", " - "),
        **dict.fromkeys("\u2044\u2215", "/"),
        **dict.fromkeys("\u00b7\u00d7\u2217\u2219\u22c5\u2715\u2716", "*"),
    }
)
_LATEX = (
    (re.compile(r"\\(?:!|left|right)|\{(?=,\})|(?<=\{,)\}"), ""),
    (re.compile(r"\\[,;:> ()\[\]]|(?<=\d)~(?=\d)|\.{2,}|(?<=[A-Za-z])\.(?=\d)|_\{[^{}]{0,40}\}"), " "),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"(?<=\d)\s?\{?(?=\\(?:[cdst]|nice)?frac)"), " "),
    (
        re.compile(
            r"\\(?:[cdst]|nice)?frac\s?(?:\{\s?([-+]?[\d.,]{1,40})\s?\}|(\d))\s?(?:\{\s?([-+]?[\d.,]{1,40})\s?\}|(\d))"
        ),
        r"\1\2/\3\4",
    ),
    (re.compile(r"(\\[A-Za-z]+)(?=\d)"), r"\1 "),
)
_EXPONENT = re.compile(
    r"\s?(?:\^|(?<=[0-9)])\*\*(?=[-+]?\d)|(?<=[A-Za-z])\*\*(?=[-+]?\d+(?![\d*]|\.\d)))\s?"
    r"(?:[({]([^(){}]{0,40})[)}]|([-+]?\d+(?:\.\d+)?|\\?[A-Za-z]+))"
)
_GROUPED = re.compile(
    r"(?<![\w.^])(?<!\d[,'])(?<!\D\d )(?<!\D\d{2} )(?<!\D\d{3} )(?:"
    r"\d{1,3}(?P<mark>[,'_])\d{3}(?:(?P=mark)\d{3})*(?!\d|(?P=mark)\d)"
    r"|\d{1,2}(?:,\d{2})+,\d{3}(?!\d|,\d)"
    r"|\d{1,3}(?: \d{3}(?!\s?/\s?\d)| 0\d{2})(?: \d{3})*(?!\d| \d)"
    r"|\d+\.\d{3}(?: \d{3})+(?: \d{1,2})?(?!\d|[ .]\d|\s?/\s?\d))"
)

_ALNUM = rf"[^\W_{UNSPACED}]"
_PLAIN = r"(?:\d+(?:\.\d*)?|\.\d+)(?!\.?\d)"
_NUMBER = re.compile(
    rf"(?<!{_ALNUM})(?<![.^])(?<!{_ALNUM}_)(?P<sign>(?<![_)\]%])(?<!\D-)[-+])?(?:\\?[$€£¥₹]\s?)?(?:"
    r"(?P<whole>\d{1,15}) {1,2}(?P<part>[1-9]\d{0,8})\s?/\s?(?P<parts>\d{1,9})(?!\.?\d)"
    rf"|(?P<plain>{_PLAIN})(?:(?:[eE]|\s?[xX*]\s?10\^)(?P<ten>[-+]?\d{{1,4}})|\^(?P<power>[-+]?\d{{1,4}}(?:\.\d{{1,4}})?)"
    rf"|\s?/\s?(?P<divisor>-?{_PLAIN}))?"
    r")(?P<percent>\s?\\?%)?"
)


class NumberSettings(ExtractingSettings):
    """The reward is 1 if the number differs from the answer by at most max(absolute, relative * |answer|), else 0."""

    absolute: NonNegativeFloat = 0.0
    """Largest accepted difference."""
    relative: NonNegativeFloat = 1e-9
    """Largest accepted difference as a fraction of the answer."""
    take: Literal["last", "first", "only"] = "last"
    """Number of the completion that counts; only: the completion must be a number and nothing else."""
    percent: Literal["hundredths", "ignored"] = "hundredths"
    """Meaning of a percent sign. hundredths: 12% is 0.12; ignored: 12% is 12."""


class Number(Reward[NumberSettings]):
    r"""Grade one number of the completion: 1,234.5, -3, .5, 12%, 3/4, 1 1/2, \frac{3}{4}, 6.02e23, 6.02 x 10^23.

    The answer is a number, a text with a number, or a list of accepted ones. docs/rewards.md has the rules.
    """

    Settings: ClassVar = NumberSettings

    def check(self, answer: Any) -> None:
        self._accepted(answer)

    def grade(self, inputs: RewardInput) -> float:
        accepted = self._accepted(inputs.answer)
        text = extracted(inputs.completion, self._settings.extract)
        number = None if text is None else self._read(text, self._settings.take)
        return float(number is not None and any(self._near(number, right) for right in accepted))

    def _near(self, number: float, right: float) -> bool:
        return abs(number - right) <= max(self._settings.absolute, self._settings.relative * abs(right))

    def _read(self, text: str, take: Literal["last", "first", "only"]) -> float | None:
        return read_number(text, take, 0.01 if self._settings.percent == "hundredths" else 1.0)

    def _accepted(self, answer: Any) -> list[float]:
        answers = answer if isinstance(answer, list | tuple) else [answer]
        numbers = [self._read(each, "only") if isinstance(each, str) else _finite(each) for each in answers]
        accepted = [number for number in numbers if number is not None]
        if not accepted or len(accepted) != len(numbers):
            raise BadAnswer(f"{answer!r:.200} is not a number")
        return accepted


def read_number(text: str, take: Literal["last", "first", "only"], percent: float) -> float | None:
    r"""Return the last, first or only number in `text`, or None if no finite number is found. Takes linear time.

    Args:
        percent: the value of 1%: 0.01, or 1.0 to ignore percent signs.

    Example:
        >>> read_number(r"so $\frac{3}{4}$ of 1,200 is 900.", "last", percent=0.01)
        900.0
        >>> read_number("12%", "only", percent=0.01)
        0.12
    """
    text = _normalized(text)
    if take == "only":
        match = _NUMBER.fullmatch(text.strip(" \t\r\n$€£¥₹*`").removesuffix("."))
    else:
        match = _NUMBER.search(text) if take == "first" else last_match(_NUMBER, text)
    return None if match is None else _value(match, percent)


def _normalized(text: str) -> str:
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{folded(match.group())}}}", text)
    text = folded(_AFTER_WHOLE.sub(" ", text)).translate(_CHARACTERS)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _EXPONENT.sub(_exponent, text)
    return _GROUPED.sub(lambda match: re.sub("[ ,'_]", "", match.group()), f" {text}")


def _exponent(match: re.Match[str]) -> str:
    """Return the replacement of a matched exponent: the exponent if its base is a number, or else a space. The exponent
    of a unit or a variable must not be read as a number."""
    exponent = (match[1] or match[2]).replace(" ", "")
    of_number = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return f"^{exponent}" if of_number and exponent[-1:].isdigit() else " "


def _value(match: re.Match[str], percent: float) -> float | None:
    groups = {name: group for name, group in match.groupdict().items() if group}
    try:
        if "whole" in groups:
            value = float(groups["whole"]) + float(groups["part"]) / float(groups["parts"])
        elif "ten" in groups:
            value = float(f"{groups['plain']}e{groups['ten']}")
        else:
            value = float(groups["plain"]) ** float(groups.get("power", 1)) / float(groups.get("divisor", 1))
    except ArithmeticError:  # a division by zero, a power that a float cannot hold
        return None
    if groups.get("sign") == "-":
        value = -value
    return _finite(value * percent if "percent" in groups else value)


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
