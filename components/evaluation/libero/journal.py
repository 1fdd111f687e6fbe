"""Episodes that are finished, kept line by line, so that a crash loses none."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from armature.components.artifacts.json_lines import JsonLines
from armature.components.evaluation.libero.episode import Actions
from armature.components.evaluation.libero.schedule import EpisodeKey, PlannedEpisode


@dataclass(frozen=True)
class EpisodeOutcome:
    """One planned episode, played or given up. seconds: of its last attempt, waiting for the policy included.

    failure: why it could not be played in any attempt; None where it was. lost: attempts that ended with the
    simulator.
    """

    success: bool
    actions: Actions
    failure: str | None
    lost: int
    seconds: float

    @property
    def steps(self) -> int:
        return len(self.actions)


class EvaluationJournal:
    """One JSON object a line for each episode. Thread safe."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(path)

    def append(self, planned: PlannedEpisode, outcome: EpisodeOutcome) -> None:
        row = {**vars(outcome), "key": planned.key, "actions": _packed(outcome.actions)}
        self._lines.append(json.dumps(row).encode())

    def read(self) -> dict[EpisodeKey, EpisodeOutcome]:
        """What was finished."""
        rows = self._lines.read()
        return {tuple(row.pop("key")): EpisodeOutcome(**{**row, "actions": _unpacked(row["actions"])}) for row in rows}


def _packed(actions: Actions) -> dict[str, Any]:
    return {"shape": actions.shape, "data": b64encode(np.ascontiguousarray(actions, "<f4").tobytes()).decode()}


def _unpacked(packed: dict[str, Any]) -> Actions:
    return np.frombuffer(b64decode(packed["data"]), "<f4").reshape(packed["shape"])
