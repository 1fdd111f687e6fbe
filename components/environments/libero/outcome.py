"""How an episode of the scripted expert ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """`phase` is the expert's last one, `retries` how often it took the object anew."""

    success: bool
    steps: int
    phase: str
    retries: int
