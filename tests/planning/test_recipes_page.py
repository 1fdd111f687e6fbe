"""The page of recipes on many GPUs says what the code would write."""

from __future__ import annotations

import pytest

from armature.plan import SIZES
from armature.plan_robots import ROBOT_SIZES
from benchmarks.plans import (
    PAGE,
    TOP,
    gpu_recipes,
    planner,
    robot_planner,
    robot_table_row,
    section,
    table_row,
    written,
)

QUICK, ROBOT = "train-vlm/qwen3-vl", "train-vla-rl/spatial-small"


def test_every_recipe_for_gpus_is_there_with_every_size() -> None:
    sections = written()
    assert list(sections) == gpu_recipes()
    for name, text in sections.items():
        sizes = SIZES if name.startswith("train-vlm/") else ROBOT_SIZES
        rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
        assert [row.split(" |")[0] for row in rows] == [f"| {gpus:,}" for gpus in sizes], name


def test_a_row_is_what_is_simulated_now() -> None:
    assert table_row(planner(QUICK), SIZES[0]) in written()[QUICK].splitlines()
    assert robot_table_row(robot_planner(ROBOT), ROBOT_SIZES[0]) in written()[ROBOT].splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train-vlm/geometry3k-7b", QUICK])
def test_all_rows_are_what_is_simulated_now(name: str) -> None:
    assert section(name) == written()[name]


def test_the_page_begins_as_it_is_written() -> None:
    assert PAGE.read_text().startswith(TOP)
