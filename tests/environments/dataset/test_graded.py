"""Hostile answers, completions and reward functions: an error before the start, or one rollout that failed."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.failures import RolloutFailed
from armature.components.environments.guarded import GuardedEpisode
from armature.components.project import project
from tests.refusals import refused

from .tables import environment_of

HANGING = 2.0
"""Seconds of the functions' time limit."""

FUNCTIONS = """
import os, sys, threading, time

def color(completion, answer, row):
    kind = row["kind"]
    if kind == "raise": raise KeyError(completion)
    if kind == "hang": time.sleep(600)
    if kind == "exit": sys.exit()
    if kind == "abort": os.abort()
    if kind == "nan": return float("nan")
    if kind == "text": return "right"
    if kind == "none": return None
    if kind == "thread": threading.Thread(target=time.sleep, args=(600,)).start()
    if kind == "print": print(completion)
    return completion == answer

def other(completion, prompts): return 1.0
"""
EXPECTED = {
    "raise": "reward_error",
    "hang": "reward_timeout",
    "exit": "reward_died",
    "abort": "reward_died",
    "nan": "reward_invalid",
    "text": "reward_invalid",
    "none": "reward_invalid",
    "thread": 1.0,
    "print": 1.0,
    "good": 1.0,
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_CACHE", f"{name}/cache")
        Path(name, "my_rewards.py").write_text(FUNCTIONS)
        with project(Path(name)):
            yield Path(name)


def made(folder: Path, rows: list[dict[str, Any]], rewards: list[dict[str, Any]], **changes: Any) -> Environment:
    lines = [json.dumps({"question": f"Number {index}?", **row}) for index, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    how = {"prompt": "{question}", "images": [], "kind": "", "split": {"by": "hash", "heldout": 0.5}}
    return environment_of({"source": "rows.jsonl"}, **{**how, "rewards": rewards, **changes})


async def played(environment: Environment, task: Task, answer: str) -> Mapping[str, float] | str:
    """The parts of the reward, or the reason of the failure."""
    episode = GuardedEpisode(environment, task, timeout=120.0)
    try:
        await episode.reset()
        return (await episode.step(answer)).reward_parts
    except RolloutFailed as failed:
        return failed.reason
    finally:
        await episode.close()


def tasks_of(environment: Environment) -> list[Task]:
    return [*environment.tasks("train"), *environment.tasks("heldout")]


def test_each_rollout_has_its_own_failure_however_many_play(folder: Path) -> None:
    rows = [{"kind": kind, "answer": "red"} for kind in EXPECTED for _ in range(2)]
    rewards = [{"name": "function", "function": "my_rewards:color", "timeout": HANGING}, {"name": "exact_match"}]

    async def play(environment: Environment) -> dict[str, Mapping[str, float] | str]:
        tasks = tasks_of(environment)
        results = await asyncio.gather(*(played(environment, task, "red") for task in tasks))
        return {task.payload["kind"]: result for task, result in zip(tasks, results, strict=True)}

    with closing(made(folder, rows, rewards, kind="kind")) as environment:
        found = asyncio.run(play(environment))
    expected = {
        kind: {"function": value, "exact_match": 1.0} if isinstance(value, float) else value
        for kind, value in EXPECTED.items()
    }
    assert found == expected


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("my_rewards:colour", "name_not_in_module"),
        ("my_reward:color", "module_missing"),
        ("my_rewards:other", "unknown_reward_argument"),
    ],
)
def test_a_function_that_cannot_be_called_is_said_before_the_start(folder: Path, function: str, code: str) -> None:
    with refused(code, repr(function)):
        made(folder, [{"answer": "red"}], [{"name": "function", "function": function}])


@pytest.mark.parametrize(
    ("reward", "column"),
    [
        ({"name": "box_iou", "units": "percent"}, "width"),
        ({"name": "point_in_box", "units": "fraction", "width": "answer", "height": "tall"}, "tall"),
        ({"name": "judge", "model": "m", "base_url": "http://127.0.0.1:1/v1", "template": "{completion} {why}"}, "why"),
    ],
)
def test_a_column_that_only_a_reward_names_is_looked_for_before_the_start(
    folder: Path, reward: dict[str, Any], column: str
) -> None:
    rows = [{"answer": [0, 0, 10, 10], "split": split} for split in ("train", "test")]
    how = {"split": {"by": "column"}}
    with (
        refused("unknown_column", repr(column)),
        closing(made(folder, rows, [reward], **how)) as environment,
    ):
        tasks_of(environment)
    with closing(made(folder, [{**row, column: 9, "height": 9} for row in rows], [reward], **how)) as environment:
        assert tasks_of(environment)


ANSWERS = st.one_of(
    st.sampled_from(["red", "B", "3", 3, [0, 0, 10, 10], ["red", "blue"], "x" * 10**6, "", None, "NaN", "\ud800"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)
SAID = st.one_of(
    st.sampled_from(["red", "B", "3", "[0, 0, 10, 10]", "", "\0", "\\boxed{" * 10**5, "1," * 10**5, "(" * 10**6]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
)
PLAIN = (
    {"name": "exact_match"},
    {"name": "choice", "extract": "boxed"},
    {"name": "number", "relative": 0.1},
    {"name": "box_iou", "threshold": 0.5},
    {"name": "point_in_box", "answer_form": "xywh"},
    {"name": "length", "at_most": 9},
    {"name": "format_tags"},
)


@settings(max_examples=100, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    answers=st.lists(ANSWERS, min_size=1, max_size=4),
    named=st.lists(st.sampled_from(PLAIN), min_size=1, max_size=3, unique_by=lambda each: each["name"]),
    refuse=st.booleans(),
    said=SAID,
)
def test_any_answer_and_any_completion(
    folder: Path, answers: list[Any], named: list[dict[str, Any]], refuse: bool, said: str
) -> None:
    rows = [{"answer": answer, "split": split} for answer in answers for split in ("train", "test")]
    skip = "refuse" if refuse else "skip"
    with closing(made(folder, rows, named, on_bad_row=skip, split={"by": "column"})) as environment:
        try:
            tasks = tasks_of(environment)
        except (ConfigurationError, DataError) as error:
            assert len(str(error)) < 20_000
            return
        for task in tasks:
            parts = asyncio.run(played(environment, task, said))
            assert isinstance(parts, Mapping), parts
            assert set(parts) == {each["name"] for each in named}
            assert all(0.0 <= value <= 1.0 for value in parts.values())
