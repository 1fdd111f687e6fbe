"""Pages of the viewer for robots: episodes of reinforcement learning, and videos of evaluations before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import regular
from armature.components.contracts.rollouts import Failure
from armature.components.evaluation.wilson import wilson_interval
from armature.components.robots.evaluation.results import LiberoResult, read_results, video_path
from armature.components.rollouts.table import FAILURES_FILE, read_failures
from armature.components.viewer.runs import MEDIA, ROBOT_EVALUATION, Run, evaluations_of
from armature.components.viewer.tables import Number, Query

Outcome = Literal["solved", "truncated"]
_COLUMNS = ("episode_id", "group_id", "task", "language", "initial_state", "chunk", "executed", "reward", "truncated")
_ANSWERS = (*_COLUMNS, "value", "logprobs", "cameras", "images")
ROLLOUTS_FILE, BATCH_FILE = "rollouts.parquet", "batch.parquet"


class EpisodeQuery(BaseModel):
    """Filter for the episodes of a training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    outcome: Outcome | Literal[""] = ""
    task: Number | None = None
    initial_state: Number | None = None
    first_step: Number | None = None
    last_step: Number | None = None
    offset: Number = 0
    limit: int = Field(100, ge=1, le=500)

    def fits(self, episode: dict[str, Any]) -> bool:
        """Return True if the episode has the requested outcome, task and initial state."""
        wanted = {name: getattr(self, name) for name in ("outcome", "task", "initial_state")}
        return all(value in ("", None) or episode[name] == value for name, value in wanted.items())


def episode_counts(run: Run) -> dict[str, Any]:
    """Return how many episodes of a run were played and how many failed, and its last step.

    The dict has the same keys as the result of `RolloutIndex.counts`, which is used for other runs.
    """
    steps = run.robot_steps()
    played = sum(len(_of_step(folder)) for folder in steps.values())
    failed = sum(len(_failures_of_step(folder)) for folder in steps.values())
    return {"rollouts": played, "failures": failed, "last_step": max(steps, default=None), "heldout_steps": []}


def find_episodes(run: Run, query: EpisodeQuery) -> dict[str, Any]:
    """Return the episodes that fit the query, and the outcomes by step.

    `total` is the number of fitting episodes, `rows` one page of them, the newest step first. `steps` has the outcomes
    of all episodes of each step in the query's range, with Wilson's 95 % interval of the success rate.
    """
    steps, matches = [], []
    for step, folder in sorted(run.robot_steps().items(), reverse=True):
        if (query.first_step is not None and step < query.first_step) or (
            query.last_step is not None and step > query.last_step
        ):
            continue
        episodes = _of_step(folder)
        solved = sum(each["outcome"] == "solved" for each in episodes)
        rate = wilson_interval(solved, len(episodes))
        steps.append(
            {"step": step, "solved": solved, "truncated": len(episodes) - solved}
            | {"success": rate.estimate, "low": rate.low, "high": rate.high}
        )
        matches += [{"step": step, **each} for each in episodes if query.fits(each)]
    return {
        "total": len(matches),
        "rows": matches[query.offset : query.offset + query.limit],
        "steps": steps[::-1],
    }


def find_failures(run: Run, query: Query) -> dict[str, Any]:
    """Return episodes that failed in all attempts, in the form of `RolloutIndex.failures` for other runs."""
    matches = [
        row
        for step, folder in sorted(run.robot_steps().items(), reverse=True)
        for failure in _failures_of_step(folder)
        if _matches(query, row := {"source": "train", "step": step, **asdict(failure)})
    ]
    reasons = sorted(Counter(row["reason"] for row in matches).items(), key=lambda each: (-each[1], each[0]))
    return {
        "total": len(matches),
        "reasons": [{"reason": reason, "count": count} for reason, count in reasons],
        "rows": matches[query.offset : query.offset + query.limit],
    }


def _matches(query: Query, row: dict[str, Any]) -> bool:
    wanted = {"source": query.source, "task_id": query.task, "group_id": query.group}
    texts = (row[name].lower() for name in ("reason", "detail", "task_id", "trajectory_id"))
    return (
        all(value in ("", row[name]) for name, value in wanted.items())
        and (query.first_step is None or query.first_step <= row["step"])
        and (query.last_step is None or row["step"] <= query.last_step)
        and any(query.find.lower() in text for text in texts)
    )


def episode_document(run: Run, step: int, episode: str) -> dict[str, Any]:
    """Return one episode, chunk by chunk.

    Each chunk has its images, value, mean log-prob and reward, and its advantage if the step's batch exists.

    Raises:
        DataError: the episode does not exist.
    """
    folder = run.robot_steps().get(step)
    answers = [] if folder is None else _rows(folder / ROLLOUTS_FILE, _ANSWERS, episode)
    if not answers:
        raise DataError(f"step {step} has no episode {episode!r}", where=str(run.store))
    batch = run.store / "robot-batches" / f"{run.fingerprint}-{step:05d}" / BATCH_FILE
    trained = _rows(batch, ("episode_id", "chunk", "advantage"), episode) if batch.is_file() else []
    advantages = {row["chunk"]: row["advantage"] for row in trained}
    return {
        **_episode(answers),
        "step": step,
        "answers": [
            {
                "chunk": each["chunk"],
                "executed": each["executed"],
                "reward": each["reward"],
                "value": each["value"],
                "logprob": float(np.mean(each["logprobs"])) if each["logprobs"] else None,
                "advantage": advantages.get(each["chunk"]),
                "images": {
                    camera: f"/images/{ref['sha256']}.{MEDIA[ref['media_type']]}"
                    for camera, ref in zip(each["cameras"], each["images"], strict=True)
                },
            }
            for each in answers
        ],
    }


def find_videos(run: Run, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the filmed episodes of a run, each with its video's address, success and number of steps.

    For a training, these are pairs of episodes from the same initial state, before and after it. For an evaluation,
    they are its own episodes.
    """
    if run.stage == ROBOT_EVALUATION:
        return [_pair(None, (run, result)) for result in _filmed(run)]
    kinds, pairs = evaluations_of(runs).get(run.fingerprint, {}), []
    sides: dict[str, list[Run]] = {"before training": [], "after training": []}
    for each in runs:
        if each.fingerprint in kinds:
            sides[kinds[each.fingerprint]].append(each)
    for after in sides["after training"]:
        for before in sides["before training"]:
            if before.settings != after.settings:
                continue
            earlier = {_begin(result): result for result in _filmed(before)}
            alike = ((earlier.get(_begin(result)), result) for result in _filmed(after))
            pairs += [_pair((before, first), (after, second)) for first, second in alike if first is not None]
    return sorted(pairs, key=lambda pair: pair["before"]["solved"] == pair["after"]["solved"])


def video_file(run: Run, path: str) -> Path:
    """Return the file of a video.

    Raises:
        DataError: the run has no such video.
    """
    videos = (run.artifact / "videos").resolve()
    with suppress(OSError, ValueError, RuntimeError):  # an invalid file name, or a symbolic link to itself
        file = (videos / path).resolve()
        if file.is_relative_to(videos) and file.suffix == ".mp4" and file.is_file():
            return file
    raise DataError(f"there is no video {path[:80]!r}", where=str(videos))


def _begin(result: LiberoResult) -> tuple[object, ...]:
    return (*result.key, result.initial_state, result.simulator_seed)


def _filmed(run: Run) -> list[LiberoResult]:
    if not run.finished:
        return []
    return [result for result in read_results(run.artifact) if (run.artifact / video_path(result.key)).is_file()]


def _pair(before: tuple[Run, LiberoResult] | None, after: tuple[Run, LiberoResult]) -> dict[str, Any]:
    result = after[1]
    sides = {"before": before, "after": after}
    return {
        **{name: getattr(result, name) for name in ("suite", "task", "language", "episode", "initial_state")},
        **{name: None if side is None else _side(*side) for name, side in sides.items()},
    }


def _side(run: Run, result: LiberoResult) -> dict[str, Any]:
    address = f"/videos/{run.fingerprint}/{video_path(result.key).removeprefix('videos/')}"
    return {"uri": address, "solved": result.success, "steps": result.steps}


def _of_step(folder: Path) -> list[dict[str, Any]]:
    file = folder / ROLLOUTS_FILE
    return _episodes(file, file.stat().st_mtime_ns)


def _failures_of_step(folder: Path) -> tuple[Failure, ...]:
    file = folder / FAILURES_FILE
    return _failures(folder, file.stat().st_mtime_ns) if file.is_file() else ()


@lru_cache(maxsize=4096)
def _failures(folder: Path, changed: int) -> tuple[Failure, ...]:
    return read_failures(folder)


@lru_cache(maxsize=4096)
def _episodes(file: Path, changed: int) -> list[dict[str, Any]]:
    """Return a summary of each episode in a rollout table, in the table's order.

    changed: the file's modification time. It is part of the cache key, so that a new file is read again.
    """
    by_episode: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(file, _COLUMNS):
        by_episode.setdefault(row["episode_id"], []).append(row)
    return [_episode(answers) for answers in by_episode.values()]


def _episode(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first, last = answers[0], answers[-1]
    return {
        "episode_id": first["episode_id"],
        "group_id": first["group_id"],
        "task": first["task"],
        "language": first["language"],
        "initial_state": first["initial_state"],
        "outcome": "truncated" if last["truncated"] else "solved",
        "actions": sum(each["executed"] for each in answers),
        "chunks": len(answers),
        "reward": sum(each["reward"] for each in answers),
    }


def _rows(file: Path, columns: Sequence[str], episode: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a table as dicts with these columns: the rows of one episode, or all if `episode` is None.

    Raises:
        DataError: the table cannot be read.
    """
    chosen = None if episode is None else pc.field("episode_id") == episode
    try:
        rows: list[dict[str, Any]] = pq.read_table(regular(file), columns=list(columns), filters=chosen).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the table cannot be read: {error}", where=str(file)) from error
    return rows
