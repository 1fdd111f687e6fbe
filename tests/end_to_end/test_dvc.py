"""DVC and a flow's stages agree: what one has made, the other does not make again, under the same digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.configuration import load_recipe
from components.contracts.machine import Machine
from components.stages import STAGES, run_stage
from tests.end_to_end.conftest import Project

SHORT = ["model.tiny.format.steps=2", "environment.train_tasks=16", "environment.heldout_tasks=16"]
SHORTER = """
[model.tiny.format]
steps = 2
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    recipe = tmp_path / "configs/train-vlm/colors.toml"
    text = recipe.read_text()
    for long, short in (("train_tasks = 4096", "train_tasks = 16"), ("heldout_tasks = 256", "heldout_tasks = 16")):
        assert long in text
        text = text.replace(long, short)
    recipe.write_text(text + SHORTER)
    return made


def test_a_second_repro_does_nothing_and_finds_what_a_flow_has_made(project: Project) -> None:
    recipe = load_recipe("train-vlm/colors", [*SHORT, f'machine.store="{project.store}"'])
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    by_flow = run_stage("model", recipe.settings_for(STAGES["model"].settings), {}, machine)

    first = project.repro("tasks", "model")
    assert "tasks: made in" in first and "model: already made" in first
    assert project.locked_digest("model") == by_flow.digest

    by_flow = run_stage("tasks", recipe.settings_for(STAGES["tasks"].settings), {}, machine)
    assert project.locked_digest("tasks") == by_flow.digest
    assert "Running stage" not in project.repro("tasks", "model")
