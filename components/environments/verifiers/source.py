"""What both interfaces of verifiers give: rows, and a way to play one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Row:
    """One task of the environment: `value` is what it takes, `identity` a digest of its content."""

    value: Any
    identity: str
    system_prompt: str | None


class VerifiersSource(Protocol):
    """What differs between the interfaces."""

    max_turns: int

    def rows(self) -> tuple[Sequence[Row], Sequence[Row] | None]:
        """The training rows, and those for evaluation if they are others."""

    async def play(self, row: Row, base_url: str) -> dict[str, float]:
        """Play the row against the endpoint at `base_url`: `reward`, and its parts and metrics by name."""
