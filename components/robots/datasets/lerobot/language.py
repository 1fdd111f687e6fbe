"""Language columns of LeRobot's format v3.1, which say more of an episode than its task.

The cell of `language_persistent` is the same in all rows of an episode: a list of texts, each with its style and the
time from which on it is valid. Events, in `language_events`, are not used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from armature.components.contracts.errors import DataError
from armature.components.robots.datasets.lerobot.episodes import EpisodeRange
from armature.components.robots.datasets.lerobot.reader import Dataset

PERSISTENT, SUBTASK = "language_persistent", "subtask"


class Subtasks:
    """Subtasks of an episode in the order of their times.

    Example:
        >>> subtasks = Subtasks([(0.0, "open the drawer"), (2.5, "take the cup")])
        >>> subtasks.at(2.4), subtasks.at(2.5)
        ('open the drawer', 'take the cup')
    """

    def __init__(self, timed: list[tuple[float, str]]) -> None:
        ordered = sorted(timed)
        self._times, self._texts = [np.float32(time) for time, _ in ordered], [text for _, text in ordered]

    def at(self, time: float) -> str | None:
        """Return the subtask that is active at a time in seconds; None before the first one."""
        place = int(np.searchsorted(self._times, np.float32(time), side="right"))
        return self._texts[place - 1] if place else None


def read_subtasks(dataset: Dataset, episode: EpisodeRange) -> Subtasks:
    """Read the subtasks of an episode.

    Raises:
        ConfigurationError: the dataset has no column language_persistent.
        DataError: a text or a time is missing, or two subtasks begin at the same time.
    """
    dataset.feature(PERSISTENT)
    cell = dataset.table(episode, [PERSISTENT])[PERSISTENT][0].as_py()
    timed = [_timed(row) for row in cell or () if row.get("style") == SUBTASK]
    if None in timed or len({time for time, _ in filter(None, timed)}) < len(timed):
        raise DataError(
            "a subtask has no text or no time, or begins at the time of another one",
            code="invalid_subtask",
            where=f"{dataset.files}, episode {episode.index}, {PERSISTENT}",
            remedy='annotate the episode again, leave it out (episodes), or set prompt = "task"',
        )
    return Subtasks([each for each in timed if each is not None])


def _timed(row: dict[str, Any]) -> tuple[float, str] | None:
    time, text = row.get("timestamp"), row.get("content")
    if not isinstance(time, float) or not np.isfinite(time) or not isinstance(text, str) or not text.strip():
        return None
    return time, text
