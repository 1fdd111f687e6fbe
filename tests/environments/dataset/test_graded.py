"""Rewards that fail: an error before the start, or a failure of one rollout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.errors import RolloutFailed
from armature.components.environments.guarded import GuardedEpisode
from armature.components.machine.project import project
from tests.refusals import refused

from .tables import environment_of, tasks_of

FUNCTIONS = """
import os, time

def color(completion, answer, row):
    kind = row["kind"]
    if kind == "raise": raise KeyError(completion)
    if kind == "hang": time.sleep(600)
    if kind == "abort": os.abort()
    if kind == "nan": return float("nan")
    return completion == answer
"""
EXPECTED = {
    "raise": "reward_error",
    "hang": "reward_timeout",
    "abort": "reward_died",
    "nan": "reward_invalid",
    "good": {"function": 1.0, "exact_match": 1.0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    with project(tmp_path):
        yield tmp_path


def made(folder: Path, rows: list[dict[str, Any]], rewards: list[dict[str, Any]], **changes: Any) -> Environment:
    lines = [json.dumps({"question": f"Number {index}?", **row}) for index, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    how = {"prompt": "{question}", "images": [], "kind": "", "split": {"by": "hash", "heldout": 0.5}}
    return environment_of({"source": "rows.jsonl"}, **{**how, "rewards": rewards, **changes})


async def played(environment: Environment, task: Task, answer: str) -> Mapping[str, float] | str:
    """Play a task and return the reward parts, or the reason of the failure."""
    episode = GuardedEpisode(environment, task, timeout=120.0)
    try:
        await episode.reset()
        return (await episode.step(answer)).reward_parts
    except RolloutFailed as failed:
        return failed.reason
    finally:
        await episode.close()


def test_reward_failures_stay_in_their_rollouts(folder: Path) -> None:
    rows = [{"kind": kind, "answer": "red"} for kind in EXPECTED for _ in range(2)]
    rewards = [{"name": "function", "function": "my_rewards:color", "timeout": 2.0}, {"name": "exact_match"}]

    async def play(environment: Environment) -> dict[str, Mapping[str, float] | str]:
        tasks = tasks_of(environment)
        results = await asyncio.gather(*(played(environment, task, "red") for task in tasks))
        return {task.payload["kind"]: result for task, result in zip(tasks, results, strict=True)}

    with closing(made(folder, rows, rewards, kind="kind")) as environment:
        assert asyncio.run(play(environment)) == EXPECTED


@pytest.mark.parametrize(
    ("reward", "column"),
    [
        ({"name": "box_iou", "units": "percent"}, "width"),
        ({"name": "point_in_box", "units": "fraction", "width": "answer", "height": "tall"}, "tall"),
        ({"name": "judge", "model": "m", "base_url": "http://127.0.0.1:1/v1", "template": "{completion} {why}"}, "why"),
    ],
)
def test_missing_reward_column_is_found_before_the_start(folder: Path, reward: dict[str, Any], column: str) -> None:
    rows = [{"answer": [0, 0, 10, 10], "split": split} for split in ("train", "test")]
    how = {"split": {"by": "column"}}
    with (
        refused("unknown_column", repr(column)),
        closing(made(folder, rows, [reward], **how)) as environment,
    ):
        tasks_of(environment)
    with closing(made(folder, [{**row, column: 9, "height": 9} for row in rows], [reward], **how)) as environment:
        assert tasks_of(environment)
