"""The common part of verifiers' two interfaces: rows and a way to play them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Row:
    """A task of the environment: `value` in the form that verifiers uses, and `identity`, a digest of its content."""

    value: Any
    identity: str


class VerifiersSource(Protocol):
    """A loaded environment of the package verifiers, through either of its interfaces (legacy or v1)."""

    max_turns: int

    def rows(self) -> tuple[Sequence[Row], Sequence[Row] | None]:
        """Return the training rows and the rows for evaluation, or None if the environment has no separate ones."""

    async def play(self, row: Row, base_url: str, key: str) -> dict[str, float]:
        """Play a row with the chat endpoint at `base_url` and return `reward`, its parts and the metrics by name."""
