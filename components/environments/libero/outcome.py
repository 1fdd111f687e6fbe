"""How an episode of the scripted policy ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemonstrationOutcome:
    """`phase` is the scripted policy's last one, `retries` how often it took the object again."""

    success: bool
    steps: int
    phase: str
    retries: int
