"""The tasks stage: tables that read back, a preview, and the same bytes every time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from PIL import Image

from armature.components.contracts.episodes import Split, Task
from armature.components.contracts.machine import Machine
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.colors import Colors
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import load_environment, load_tasks
from armature.components.stages import run_stage
from tests.refusals import refused

from .conftest import EXAMPLES, Example


@pytest.fixture
def chosen(example: tuple[str, Example]) -> EnvironmentSettings:
    name, known = example
    return EnvironmentSettings(name=name, args=known.args, train_tasks=20, heldout_tasks=6, seed=3)


def made(settings: EnvironmentSettings, store: Path) -> tuple[Path, str]:
    artifact = run_stage("tasks", settings, {}, Machine(store=str(store)))
    return artifact.path, artifact.digest


def test_tasks_and_environment_read_back(chosen: EnvironmentSettings, tmp_path: Path) -> None:
    folder, _ = made(chosen, tmp_path)
    environment = make_environment(chosen)
    assert load_tasks(folder, "train") == list(environment.tasks("train"))
    assert load_tasks(folder, "heldout") == list(environment.tasks("heldout"))
    assert list(load_environment(folder).tasks("train")) == load_tasks(folder, "train")
    frame = pd.read_parquet(folder / "train.parquet")
    assert frame.columns.tolist() == ["task_id", "split", "payload"] and len(frame) == 20
    with Image.open(folder / "preview.png") as preview:
        assert len(preview.convert("RGB").getcolors(10**6) or []) > 2


def test_two_stores_hold_the_same_digest(chosen: EnvironmentSettings, tmp_path: Path) -> None:
    assert made(chosen, tmp_path / "one")[1] == made(chosen, tmp_path / "other")[1]


def test_a_folder_that_is_no_tasks_artifact_is_refused(tmp_path: Path) -> None:
    with refused("table_unreadable", tmp_path):
        load_tasks(tmp_path, "train")
    with refused("not_a_tasks_artifact", tmp_path):
        load_environment(tmp_path)


def test_an_unknown_environment_suggests_a_known_one() -> None:
    with refused("unknown_name", "'colors'"):
        EnvironmentSettings(name="colrs", args={}, train_tasks=1, heldout_tasks=1, seed=0)


def test_settings_import_quickly_and_without_torch() -> None:
    imports = "import armature.components.environments.settings, sys"
    code = f"{imports}; sys.exit(bool({{'torch', 'verifiers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Odd(Colors):
    """Lists `tasks`."""

    listed: ClassVar[Callable[[Split], Any]]

    def tasks(self, split: Split) -> Iterator[Task]:
        found: Iterator[Task] = type(self).listed(split)
        return found


def leaves(split: Split) -> Any:
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("listed", "code", "value"),
    [
        pytest.param(lambda split: [], "no_tasks", "'train'", id="none"),
        pytest.param(lambda split: (Task(f"t{n}", split, {}) for n in count()), "too_many_tasks", 2, id="endless"),
        pytest.param(lambda split: [Task("t", split, {})] * 2, "task_repeated", "'t'", id="one name twice"),
        pytest.param(lambda split: ["t"], "tasks_not_listed", "str", id="no task"),
        pytest.param(lambda split: None, "tasks_not_listed", "TypeError", id="nothing"),
        pytest.param(lambda split: [Task("t", "test", {})], "tasks_not_listed", "'test'", id="another split"),  # type: ignore[arg-type]
        pytest.param(lambda split: [Task("\ud800", split, {})], "tasks_not_listed", "task_id", id="surrogate"),
        pytest.param(lambda split: [Task("t", split, {"x": float("nan")})], "tasks_not_listed", "ValueError", id="nan"),
        pytest.param(lambda split: [Task("t", split, {"x": object()})], "tasks_not_listed", "TypeError", id="not JSON"),
        pytest.param(leaves, "tasks_not_listed", "SystemExit", id="exit"),
        pytest.param(lambda split: [Task("t", split, {})], "episode_not_started", "KeyError", id="cannot be begun"),
    ],
)
def test_tasks_that_are_none_are_refused(
    listed: Callable[[Split], Any], code: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "listed", staticmethod(listed), raising=False)
    monkeypatch.setitem(ENVIRONMENTS._entries, "odd", f"{__name__}:Odd")
    args = EXAMPLES["colors"].args
    settings = EnvironmentSettings(name="odd", args=args, train_tasks=2, heldout_tasks=2, seed=3)
    with refused(code, value):
        made(settings, tmp_path)


def test_an_argument_of_evaluations_that_does_not_exist_is_refused_with_the_recipe(chosen: EnvironmentSettings) -> None:
    with refused("extra_forbidden", "no_such_argument"):
        EnvironmentSettings.model_validate(chosen.model_dump() | {"evaluation_args": {"no_such_argument": 1}})
