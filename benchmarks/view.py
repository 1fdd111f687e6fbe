"""A million rollouts of a thousand steps: what a filter of `armature view` takes, against a scan of the same tables."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from armature.components.artifacts.tables import write_table
from armature.components.rollouts.table import FAILURES, ROLLOUTS
from armature.components.viewer.tables import Query, RolloutIndex
from benchmarks.table import Row, alternate, seconds

STEPS, GROUPS, SIZE, ROUNDS, TOKENS = 1000, 125, 8, 5, 20
WORDS = np.array(["the", "red", "green", "blue", "cat", "sits", "on", "a", "mat", "because", "light", "falls"])
RUN = "f" * 20


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch)
        for step in range(1, STEPS + 1):
            folder = store / "rollouts" / f"{RUN}-{step:05d}"
            folder.mkdir(parents=True)
            write_step(folder, step, GROUPS)
        index = RolloutIndex(store)
        reading = seconds(index.refresh)
        tables = ds.dataset(sorted(str(path) for path in store.glob("rollouts/*/rollouts.parquet")))
        note = f"{STEPS * GROUPS * SIZE:,} rollouts in {STEPS:,} tables, read once in {reading:.1f} s"
        rows = [
            _row("rewards of 1 for one task", index, tables, Query(low=1, task="task-00042"), note),
            _row("a text, the longest first", index, tables, Query(find="light falls", sort="length-"), ""),
        ]
        index.close()
    return rows


def _row(what: str, index: RolloutIndex, tables: ds.Dataset, query: Query, note: str) -> Row:
    if query.find:
        condition = pc.match_substring(pc.field("completion"), query.find, ignore_case=True)
    else:
        condition = (pc.field("reward") >= query.low) & (pc.field("task_id") == query.task)
    scan: Callable[[], int] = partial(tables.count_rows, filter=condition)
    assert index.search(RUN, query)["total"] == scan()
    both = alternate(ROUNDS, lambda: seconds(partial(index.search, RUN, query)), lambda: seconds(scan))
    return Row(what, both.ours, both.baseline, "pyarrow dataset, counting alone", "s", "lower", note, both.spread)


def write_step(folder: Path, step: int, groups_of_step: int, images: Sequence[dict[str, Any]] = ()) -> pa.Table:
    """Write a step of `groups_of_step` groups of SIZE rollouts into `folder` and return the table. Each rollout shows
    one of the `images`, if there are any."""
    random = np.random.default_rng(step)
    n = groups_of_step * SIZE
    groups = np.repeat(np.arange(groups_of_step), SIZE)
    columns = {
        "group_id": [f"{step:05d}-{group:04d}" for group in groups],
        "trajectory_id": [f"{step:05d}-{group:04d}-{i % SIZE:02d}" for i, group in enumerate(groups)],
        "environment": ["colors"] * n,
        "task_id": [f"task-{(step * 31 + group) % 5000:05d}" for group in groups],
        "split": ["train"] * n,
        "truncated": [False] * n,
        "turn": [0] * n,
        "policy_version": [step - 1] * n,
        "prompt_token_ids": [[1, 2, 3]] * n,
        "completion_token_ids": list(random.integers(0, 100, (n, TOKENS))),
        "completion_logprobs": list(random.normal(-1, 0.1, (n, TOKENS)).astype(np.float32)),
        "finish_reason": ["stop"] * n,
        "experts": [None] * n,
        "tool_calls": [[]] * n,
        "images": [[images[(step * n + i) % len(images)]] if images else [] for i in range(n)],
        "messages": ["[]"] * n,
        "completion": [" ".join(words) for words in random.choice(WORDS, (n, TOKENS))],
        "reward": random.integers(0, 2, n).astype(float),
        "reward_parts": [[("correct", 1.0)]] * n,
        "anchor_key": [None] * n,
        "admissible_key": [None] * n,
        "action_defect": [None] * n,
        "generate_seconds": [0.1] * n,
        "environment_seconds": [0.1] * n,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in ROLLOUTS.schema]
    table = pa.table(arrays, ROLLOUTS.schema)
    write_table(folder / "rollouts.parquet", table, ROLLOUTS)
    write_table(folder / "failures.parquet", [], FAILURES)
    return table
