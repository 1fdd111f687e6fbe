"""What the trainer knows of the tokens of a step, for the pages that show its rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from armature.components.batches.ratios import read_log_ratios
from armature.components.batches.table import read_batch
from armature.components.contracts.batches import LogRatios
from armature.components.contracts.errors import DataError
from armature.components.contracts.rollouts import Trajectory
from armature.components.reports.records import TurnScores, turn_scores


def read_scores(
    trajectories: Sequence[Trajectory], batch: Path, log_ratios: Path, group_id: str | None = None
) -> dict[str, list[TurnScores]]:
    """Those of the batch in a folder, or of one group of it; without ratios where their file is absent or damaged.

    Raises:
        DataError: the batch cannot be read.
    """
    known: Mapping[str, LogRatios] = {}
    with suppress(DataError):
        known = read_log_ratios(log_ratios, group_id)
    return turn_scores(trajectories, read_batch(batch, group_id), known)
