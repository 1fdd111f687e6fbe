"""Mathematical equivalence, as the package math-verify decides it."""

from __future__ import annotations

import logging
import re
import resource
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveInt

from armature.components.artifacts.sources import versions
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import DISTRIBUTION
from armature.components.rewards.reward import (
    BadAnswer,
    CpuBoundSettings,
    ExtractingSettings,
    Reward,
    RewardInput,
    extracted,
)
from armature.components.rewards.text import accepted_texts

MEMORY = 4 * 2**30
"""Bytes of address space: towers of powers are evaluated for as long as there is memory."""

_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
"""Which an expression alone does not contain, but for LaTeX's commands."""


class MathSettings(ExtractingSettings, CpuBoundSettings):
    """1 if the completion's last expression equals the answer mathematically, else 0."""

    longest: PositiveInt = 20_000
    """Characters of a completion that are looked at: the last ones, where the answer is."""


class Math(Reward[MathSettings]):
    """Reads LaTeX and plain expressions. The answer is either, or a number, or a list of those: any of them is right.

    A completion on which the library fails is worth 0, as one that takes too long is.
    """

    Settings: ClassVar = MathSettings
    runs = "process"

    def __init__(self, settings: MathSettings, folder: Path) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigurationError(
                "the reward 'math' needs the package math-verify",
                code="math_verify_missing",
                remedy=f"pip install '{DISTRIBUTION}[math]'",
            ) from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off: ours hold
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, most))
        super().__init__(settings, folder)
        self._library = math_verify
        if not self._verified(self._parsed("1"), self._parsed("1")):
            raise ConfigurationError(
                "math-verify does not find that 1 equals 1",
                code="math_verify_broken",
                remedy="install another release of it",
            )

    @staticmethod
    def sources(settings: MathSettings) -> dict[str, str]:
        return versions("math-verify", "latex2sympy2-extended", "sympy")

    def check(self, answer: Any) -> None:
        self._accepted(answer)

    def grade(self, given: RewardInput) -> float:
        accepted = self._accepted(given.answer)
        text = extracted(given.completion, self._settings.extract)
        if text is None:
            return 0.0
        text = text[-self._settings.longest :]
        whole = self._settings.extract != "all" or not _WORD.search(text)
        try:
            said = self._expression(text) if whole else self._parsed(text)
            return float(any(self._verified(right, said) for right in accepted))
        except Exception:  # a library that fails on all completions is refused at the start
            return 0.0

    def _accepted(self, answer: Any) -> list[list[Any]]:
        found = [self._expression(text) for text in accepted_texts(answer)]
        if not all(any(not isinstance(each, str) for each in parsed) for parsed in found):
            raise BadAnswer(f"{answer!r:.200} is not a mathematical expression")
        return found

    def _verified(self, right: list[Any], said: list[Any]) -> bool:
        return bool(self._library.verify(right, said, timeout_seconds=None))

    def _expression(self, text: str) -> list[Any]:
        """Of a text that is an expression as a whole; in a sentence, without dollar signs, only numbers are found."""
        marked = any(sign in text for sign in ("$", "\\boxed", "\\(", "\\["))
        return ([] if marked else self._parsed(f"${text}$")) or self._parsed(text)

    def _parsed(self, text: str) -> list[Any]:
        """Expressions, and the text of the last one."""
        found: list[Any] = self._library.parse(text, parsing_timeout=None)
        return found
