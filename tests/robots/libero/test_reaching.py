"""Tasks that `reach_distance` can simplify, compared with LIBERO's own parser of tasks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from armature.check import check_ahead
from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.libero.package import import_libero
from armature.components.robots.libero.tasks import (
    MAX_STEPS,
    LiberoTask,
    refuse_missing_shapes,
    refuse_unreachable,
    suite_tasks,
)
from tests.refusals import refused

from .simulated import needs_libero, simulator

pytestmark = needs_libero

NEAR = simulator(reach_distance=0.1)
ABOUT_FURNITURE = {"libero_spatial": 0, "libero_object": 0, "libero_goal": 2, "libero_10": 2, "libero_90": 16}
"""Number of tasks, by suite, whose first goal predicate is about a drawer, a door or a knob."""


def is_refused(task: LiberoTask) -> bool:
    try:
        refuse_unreachable([task], NEAR)
    except ConfigurationError:
        return True
    return False


@pytest.mark.parametrize("suite", MAX_STEPS)
def test_rejects_reach_distance_for_furniture_tasks(suite: str) -> None:
    import_libero()
    from libero.libero.envs.bddl_utils import robosuite_parse_problem

    refused = {task.index for task in suite_tasks(suite) if is_refused(task)}
    expected = set()
    for task in suite_tasks(suite):
        parsed = robosuite_parse_problem(str(task.bddl_file))
        assert task.goal == parsed["goal_state"]
        objects = [name for names in parsed["objects"].values() for name in names]
        if parsed["goal_state"][0][1] not in objects:
            expected.add(task.index)
    assert refused == expected and len(refused) == ABOUT_FURNITURE[suite]
    refuse_unreachable(suite_tasks(suite), simulator())


def test_reach_error_names_task_and_furniture() -> None:
    values = ("wooden_cabinet_1_middle_region", "libero_goal, task 0", "libero_goal 0, libero_goal 7")
    with refused("object_missing", *values):
        refuse_unreachable(suite_tasks("libero_goal"), NEAR)


@pytest.mark.parametrize("suite", MAX_STEPS)
def test_scenes_without_compact_shapes_are_refused(suite: str) -> None:
    complete = suite in ("libero_spatial", "libero_object", "libero_goal")
    with nullcontext() if complete else refused("compact_shape_missing", suite):
        refuse_missing_shapes(suite_tasks(suite), simulator())
    refuse_missing_shapes(suite_tasks(suite), simulator(assets=None))


GOAL = ["evaluation.suites=['libero_goal']", "evaluation.max_steps={libero_goal=9}"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "code", "value"),
    [
        ("train-vla-rl/tiny", ["rollouts.suite=libero_goal"], "object_missing", "libero_goal"),
        ("train-vla-rl/tiny", GOAL, "object_missing", "libero_goal"),
        ("train-vla-rl/tiny", ["rollouts.tasks=[10]"], "unknown_task", 10),
        ("train-vla-rl/tiny", ["rollouts.initial_states=[50]"], "unknown_initial_state", 50),
        ("train-vla/tiny", ["evaluation.tasks=[11]"], "unknown_task", 11),
        (
            "train-vla/tiny",
            ["evaluation.suites=['libero_10']", "evaluation.max_steps={libero_10=9}"],
            "compact_shape_missing",
            "libero_10",
        ),
    ],
)
def test_rejects_recipe_before_any_stage_runs(recipe: str, overrides: list[str], code: str, value: object) -> None:
    with refused(code, value):
        check_ahead(load_recipe(recipe, overrides))
