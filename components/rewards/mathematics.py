"""A reward for mathematically equivalent expressions, compared by the package math-verify."""

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
"""Limit on the process's address space in bytes. Without it, math-verify evaluates towers of powers until memory is
full."""

_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
"""Pattern of a word of prose. An expression without prose has no match, because LaTeX commands begin with a
backslash."""


class MathSettings(ExtractingSettings, CpuBoundSettings):
    """The reward is 1 if the completion's last expression equals the answer mathematically, else 0."""

    longest: PositiveInt = 20_000
    """Number of characters, from the end of the completion, that are searched for the expression."""


class Math(Reward[MathSettings]):
    """Compare LaTeX or plain expressions. The answer is an expression, a number, or a list of accepted ones.

    A completion gets 0 if math-verify fails on it or takes too long.
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
        # math-verify warns that its own time limits are off. `cpu_limit` and MEMORY replace them.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, most))
        super().__init__(settings, folder)
        self._library = math_verify
        if not self._verified(self._parsed("1"), self._parsed("1")):
            raise ConfigurationError(
                "math-verify does not verify that 1 equals 1",
                code="math_verify_broken",
                remedy="install another release of math-verify",
            )

    @staticmethod
    def sources(settings: MathSettings) -> dict[str, str]:
        return versions("math-verify", "latex2sympy2-extended", "sympy")

    def check(self, answer: Any) -> None:
        self._accepted(answer)

    def grade(self, inputs: RewardInput) -> float:
        accepted = self._accepted(inputs.answer)
        text = extracted(inputs.completion, self._settings.extract)
        if text is None:
            return 0.0
        text = text[-self._settings.longest :]
        whole = self._settings.extract != "all" or not _WORD.search(text)
        try:
            expression = self._expression(text) if whole else self._parsed(text)
            return float(any(self._verified(right, expression) for right in accepted))
        except Exception:  # __init__ has checked that math-verify works at all
            return 0.0

    def _accepted(self, answer: Any) -> list[list[Any]]:
        expressions = [self._expression(text) for text in accepted_texts(answer)]
        if not all(any(not isinstance(each, str) for each in parsed) for parsed in expressions):
            raise BadAnswer(f"{answer!r:.200} is not a mathematical expression")
        return expressions

    def _verified(self, right: list[Any], expression: list[Any]) -> bool:
        return bool(self._library.verify(right, expression, timeout_seconds=None))

    def _expression(self, text: str) -> list[Any]:
        """Parse a text that consists of one expression and nothing else.

        If the text has no math delimiters, add dollar signs: without delimiters, math-verify recognizes numbers only.
        """
        delimited = any(sign in text for sign in ("$", "\\boxed", "\\(", "\\["))
        return ([] if delimited else self._parsed(f"${text}$")) or self._parsed(text)

    def _parsed(self, text: str) -> list[Any]:
        """Return the list that math-verify makes of a text: the expressions in it, then the text of the last one."""
        expressions: list[Any] = self._library.parse(text, parsing_timeout=None)
        return expressions
