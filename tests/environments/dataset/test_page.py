"""The recipe of the page on one's own data is complete, and its charts are what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from armature.components.configuration import load_recipe
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.project import project
from benchmarks.charts import COLORS, write_charts

PAGE = Path(__file__).resolve().parents[3] / "docs/your-own-data.md"


def test_the_recipe_of_the_page_gives_tasks(tmp_path: Path) -> None:
    text, *_ = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) <= 30
    write_charts(tmp_path / "charts", count=24)
    (tmp_path / "charts/charts.toml").write_text(text)
    recipe = load_recipe(str(tmp_path / "charts/charts.toml"))
    settings: Any = recipe.sections["environment"]
    assert isinstance(settings, EnvironmentSettings)
    with project(tmp_path / "charts"):
        environment: Any = make_environment(settings)
        tasks = [*environment.tasks("train"), *environment.tasks("heldout")]
        answers = {task.payload["row"]: environment.demonstration(task)[0] for task in tasks}
    assert len(tasks) == 24 and {task.payload["kind"] for task in tasks} <= {"first", "second", "third", "fourth"}
    for row, answer in answers.items():
        with Image.open(tmp_path / f"charts/images/{row:04d}.png") as image:
            pixels = np.asarray(image.convert("RGB"), dtype=int)
        tops = {}
        for name, code in COLORS.items():
            color = [int(code[start : start + 2], 16) for start in (1, 3, 5)]
            tops[name] = int(np.argwhere(np.abs(pixels - color).sum(-1) < 30)[:, 0].min())
        assert min(tops, key=lambda name: tops[name]) == answer
