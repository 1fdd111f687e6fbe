"""The environment `mixture`: shares of tasks, which environment plays a task, and settings that are refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.machine import Machine
from armature.components.environments.colors import Colors, ColorsSettings
from armature.components.environments.make import environment_sources, make_environment, refuse_ahead
from armature.components.environments.mixture import EnvironmentMixture, MixturePart, interleaved
from armature.components.environments.settings import EnvironmentSettings
from armature.components.rl.metrics import rollout_metrics
from armature.components.rollouts.collect import collect
from tests.refusals import refused
from tests.rollouts.conftest import SAMPLING, RecordedEvents, ScriptedPolicy

COLORS: dict[str, Any] = {"name": "colors", "train_tasks": 8, "heldout_tasks": 4}
RECALL: dict[str, Any] = {
    "name": "recall",
    "args": {"images": 2},
    "train_tasks": 2,
    "heldout_tasks": 2,
}


def mixture(train_tasks: int | None = None, **parts: dict[str, Any]) -> EnvironmentSettings:
    values = {"name": "mixture", "args": {"parts": parts}, "train_tasks": train_tasks, "seed": 5}
    return EnvironmentSettings.model_validate(values)


def colors(count: int, **options: Any) -> Colors:
    return Colors(ColorsSettings(**options), train_tasks=count, heldout_tasks=1, seed=0, processes=1)


@given(st.lists(st.floats(0.05, 20), min_size=2, max_size=5), st.integers(1, 300))
def test_every_beginning_has_the_shares_of_the_weights(weights: list[float], count: int) -> None:
    named = {str(number): weight for number, weight in enumerate(weights)}
    taken = Counter(name for name, _ in islice(interleaved(named), count))
    for name, weight in named.items():
        assert abs(taken[name] - count * weight / sum(weights)) < len(weights)


def test_tasks_repeat_until_each_has_been_listed() -> None:
    tasks = list(make_environment(mixture(colors=COLORS, recall=RECALL | {"weight": 0.5})).tasks("train"))
    played = Counter(task.payload["environment"] for task in tasks)
    assert played == {"colors": 8, "recall": 4} or played == {"colors": 8, "recall": 3}
    assert len({task.task_id for task in tasks}) == len(tasks)
    own = {task.payload["task"]["task_id"] for task in tasks}
    assert own == {f"colors-train-{n:05d}" for n in range(8)} | {f"recall-train-{n:05d}" for n in range(2)}


def test_number_of_tasks_can_be_set() -> None:
    tasks = list(make_environment(mixture(100, colors=COLORS | {"weight": 3.0}, recall=RECALL)).tasks("train"))
    assert Counter(task.payload["environment"] for task in tasks) == {"colors": 75, "recall": 25}


def test_heldout_tasks_are_listed_once_in_turn() -> None:
    environment = make_environment(mixture(colors=COLORS | {"weight": 9.0}, recall=RECALL))
    named = [task.payload["environment"] for task in environment.tasks("heldout")]
    assert named == ["colors", "recall", "colors", "recall", "colors", "colors"]


def test_each_environment_plays_by_its_own_rules(tmp_path: Path) -> None:
    """An episode has the turns and the reward weights of its own environment, also where rewards have equal names."""
    made = make_environment(mixture(colors=COLORS, recall=RECALL))
    assert isinstance(made, EnvironmentMixture)
    strict = EnvironmentMixture(made.parts | {"dear": MixturePart(colors(2, correct_weight=5.0))})
    tasks = list(strict.tasks("train"))
    policy = ScriptedPolicy(lambda messages, seed: "red")
    outputs = asyncio.run(
        collect(
            strict,
            tasks,
            1,
            policy,
            ImageStore(tmp_path / "images"),
            SAMPLING,
            step=0,
            seed=1,
            machine=Machine(),
            events=RecordedEvents(),
        )
    )
    assert not outputs.failures
    of_task = {task.task_id: task for task in tasks}
    rewards: dict[str, list[float]] = {}
    for each in outputs.trajectories:
        assert len(each.turns) == strict.parts[each.environment].environment.max_turns
        rewards.setdefault(each.environment, []).append(each.reward)
        if each.environment in ("colors", "dear"):
            best = 5.0 if each.environment == "dear" else 1.0
            assert each.reward == best * (of_task[each.task_id].payload["task"]["payload"]["color"] == "red")
    metrics = rollout_metrics(outputs, strict.parts)
    for name, values in rewards.items():
        assert metrics[f"reward_of/{name}"] == pytest.approx(sum(values) / len(values))
        assert metrics[f"rollouts_of/{name}"] == len(values)


def test_sources_are_those_of_all_environments() -> None:
    sources = environment_sources(mixture(colors=COLORS, recall=RECALL))
    assert {"colors/code", "recall/code"} <= sources.keys()


@pytest.mark.parametrize(
    ("code", "key", "parts"),
    [
        ("too_short", "parts", {"one": COLORS}),
        ("string_pattern_mismatch", "a/b", {"a/b": COLORS, "b": COLORS}),
        ("value_error", "parts.a", {"a": COLORS | {"seed": 3}, "b": COLORS}),
        ("value_error", "parts.a", {"a": COLORS | {"evaluation_args": {"noise": 0.0}}, "b": COLORS}),
        ("greater_than", "parts.a.weight", {"a": COLORS | {"weight": 0.0}, "b": COLORS}),
        ("value_error", "parts.a", {"a": mixture(c=COLORS, d=COLORS).model_dump(exclude={"seed"}), "b": COLORS}),
        ("value_error", "train_tasks", {"a": {"name": "colors", "heldout_tasks": 1}, "b": COLORS}),
    ],
)
def test_rejects_wrong_parts(code: str, key: str, parts: dict[str, Any]) -> None:
    with refused(code, key):
        mixture(**parts)


def test_rejects_what_cannot_be_mixed() -> None:
    with refused("mixture_too_uneven"):
        list(EnvironmentMixture({"a": MixturePart(colors(9)), "b": MixturePart(colors(9), 1e-5)}).tasks("train"))
    with refused("mixture_part_empty"):
        list(EnvironmentMixture({"a": MixturePart(colors(0)), "b": MixturePart(colors(9))}).tasks("train"))
    with refused("unknown_kind_field"):
        refuse_ahead(mixture(colors=COLORS, recall=RECALL), "color", 1, 0)
