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
from armature.components.robots.datasets.quantiles import Array

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
        DataError: a text or a time is missing, or two subtasks begin at the same time.
    """
    return _subtasks(dataset.table(episode, [PERSISTENT])[PERSISTENT][0].as_py(), dataset, episode)


def subtask_at(subtasks: Subtasks, time: float, dataset: Dataset, episode: EpisodeRange, frame: int) -> str:
    """Return the text of the subtask that is active at a frame and its time.

    Raises:
        DataError: no subtask has begun.
    """
    if (text := subtasks.at(time)) is None:
        raise DataError(
            f"no subtask is active at {time:.9g} s",
            code="no_subtask",
            where=f"{dataset.files}, episode {episode.index}, frame {frame}",
            remedy='annotate the episode from its beginning, leave it out (episodes), or set prompt = "task"',
        )
    return text


def check_subtasks(dataset: Dataset, frames: Array) -> None:
    """Check that a subtask is active at these ascending frames of the dataset. Each data file is read once.

    Raises:
        DataError: no subtask has begun at a frame, or an episode's subtasks are damaged.
    """
    file: tuple[int, int] | None = None
    for number in frames.tolist():
        episode = dataset.episode_at(number)
        if file != (episode.chunk, episode.file):
            file = (episode.chunk, episode.file)
            first, last = dataset.episodes.in_file(*file)
            table = dataset.table(first, [PERSISTENT], last)
        subtasks = _subtasks(table[PERSISTENT][episode.start - first.start].as_py(), dataset, episode)
        time = table["timestamp"][number - first.start].as_py()
        subtask_at(subtasks, time, dataset, episode, number - episode.start)


def _subtasks(cell: Any, dataset: Dataset, episode: EpisodeRange) -> Subtasks:
    """Return the subtasks of a cell of `language_persistent`; see `read_subtasks`."""
    if isinstance(cell, list) and all(isinstance(row, dict) for row in cell):
        timed = [_timed(row) for row in cell if row.get("style") == SUBTASK]
    else:
        timed = [] if cell is None else [None]
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
