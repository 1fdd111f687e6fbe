"""A small configuration of every registered environment, with answers that always win and always lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from reasoning_gym import create_dataset
from sklearn.datasets import load_digits

from armature.components.contracts.episodes import Task
from armature.components.environments.generated import ColorImageSettings
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings

from .alfworld.games_of import TEXT
from .dataset.tables import args_of, rows_of, write_images, write_jsonl

COLORS = ColorImageSettings().colors
IMAGE: dict[str, Any] = {"image_size": 56}
SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}


CHARTS = TemporaryDirectory()
"""Folder with a table for the environment `dataset`; it exists as long as this process."""


def charts() -> dict[str, Any]:
    rows = [{**row, "split": "train" if row["id"] < 24 else "test"} for row in rows_of(40)]
    write_images(Path(CHARTS.name), rows)
    write_jsonl(Path(CHARTS.name) / "rows.jsonl", rows)
    return args_of({"source": f"{CHARTS.name}/rows.jsonl"}, kind="answer", split={"by": "column"})


def path_over_ice(desc: list[str]) -> str:
    """Return the moves of a shortest path over a lake, by breadth-first search."""
    paths = {(0, 0): ""}
    for row, column in (places := [(0, 0)]):
        for move, down, right in (("left", 0, -1), ("down", 1, 0), ("right", 0, 1), ("up", -1, 0)):
            there = row + down, column + right
            if there not in paths and all(0 <= each < len(desc) for each in there) and desc[there[0]][there[1]] != "H":
                paths[there] = f"{paths[row, column]}{move}, "
                places.append(there)
    return paths[len(desc) - 1, len(desc) - 1]


@dataclass(frozen=True)
class Example:
    """Arguments of an environment. The answers `wins(task, turn)` earn the full reward `best`; `loses` earns 0.
    Without `images` it shows texts only."""

    args: dict[str, Any]
    wins: Callable[[Task, int], str]
    loses: str
    best: float
    images: bool = True


EXAMPLES = {
    "colors": Example(
        IMAGE,
        lambda task, turn: f" {task.payload['color'].title()}.\n",
        "an image",
        1.0,
    ),
    "digits": Example(
        {"digits": 3, "image_size": 20},
        lambda task, turn: f"{load_digits().target[task.payload['rows']].sum()}",
        "an image",
        1.0,
    ),
    "dot": Example(
        {"image_size": 64, "dot": [10, 20]},
        lambda task, turn: f" {task.payload['color'].title()}.\n",
        "an image",
        1.0,
    ),
    "gymnasium": Example(
        {
            "id": "FrozenLake-v1",
            "make": {
                "is_slippery": False,
                "desc": {
                    "call": "gymnasium.envs.toy_text.frozen_lake:generate_random_map",
                    "args": {"size": 8, "seed": "{seed}"},
                },
            },
            "actions": ["left", "down", "right", "up"],
            "actions_per_turn": 64,
            "image_size": 112,
            "max_turns": 2,
        },
        lambda task, turn: path_over_ice(task.payload["make"]["desc"]),
        "left",
        1.0,
    ),
    "motion": Example(
        {"frames": 6, "image_size": 56},
        lambda task, turn: f" {task.payload['way'].title()}.\n",
        "up",
        1.0,
    ),
    "reasoning_gym": Example(
        {"task": "chain_sum", "config": SUMS},
        lambda task, turn: create_dataset("chain_sum", seed=task.payload["seed"], size=1000, **SUMS)[
            task.payload["number"]
        ]["answer"],
        "no idea",
        1.0,
        images=False,
    ),
    "recall": Example(
        {
            **IMAGE,
            "images": 2,
            "filler_turns": 1,
            "asked": "random",
            "remember": "Remember image {number}.",
            "question": "What colour was image {number}?",
        },
        lambda task, turn: task.payload["colors"][task.payload["asked"]] if turn == 3 else "ok",
        "an image",
        1.0,
    ),
    "coordinates": Example(
        {
            "image_size": 112,
            "dot_radius": 4,
            "tolerance": 3.0,
            "guesses": 3,
            "show_guess": True,
            "hit_weight": 0.5,
            "closeness_weight": 0.25,
            "format_weight": 0.25,
        },
        lambda task, turn: "1,1" if turn == 0 else f"{task.payload['x']}, {task.payload['y']}",
        "over there",
        1.0,
    ),
    "mixture": Example(
        {
            "parts": {
                "many": {"name": "colors", "args": IMAGE, "train_tasks": 18, "heldout_tasks": 8, "weight": 3.0},
                "few": {"name": "dataset", "args": charts()},
            }
        },
        lambda task, turn: str(task.payload["task"]["payload"].get("color") or task.payload["task"]["payload"]["kind"]),
        "neither",
        1.0,
    ),
    "dataset": Example(charts(), lambda task, turn: f" {task.payload['kind'].title()}.", "neither", 1.0),
    "alfworld/text": Example(
        TEXT,
        lambda task, turn: f"<action>{task.payload['plan'][turn]}</action>",
        "over there",
        10.0,
    ),
}


@pytest.fixture(params=sorted(EXAMPLES), scope="session")
def example(request: pytest.FixtureRequest) -> Iterator[tuple[str, Example]]:
    """Name and example of an environment. One such environment stays open, so that shared processes start only once."""
    name, case = request.param, EXAMPLES[request.param]
    settings = EnvironmentSettings(name=name, args=case.args, train_tasks=1, heldout_tasks=1, seed=0)
    with closing(make_environment(settings)):
        yield name, case
