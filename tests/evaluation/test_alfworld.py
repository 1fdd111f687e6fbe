"""An evaluation in ALFWorld's text engine, with a scripted policy in place of a server."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from armature.components.artifacts.tables import read_table
from armature.components.configuration.stages import run_stage
from armature.components.contracts.episodes import Task
from armature.components.contracts.stages import Artifact
from armature.components.environments.alfworld.games.game import KINDS
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import load_tasks
from armature.components.evaluation.results import RESULTS, RESULTS_FILE
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.evaluation.wilson import wilson_interval
from armature.components.inference.client import Completion
from armature.components.rollouts.play import RolloutId
from tests.builders import make_machine
from tests.environments.alfworld.games_of import TEXT
from tests.evaluation.test_results import INFERENCE, VALUES
from tests.rollouts.conftest import reply

TURNS = 12
GAMES = TEXT["games"] | {"density": 0.3, "most_receptacles": 4}
ENVIRONMENT = {
    "name": "alfworld/text",
    "train_tasks": 3,
    "heldout_tasks": 12,
    "args": TEXT | {"games": GAMES, "heldout_source": "valid_seen", "max_turns": TURNS},
}


class ScriptedServers:
    """A replacement of the server pool with scripted answers. They depend on the index of the task modulo 3.

    0: the actions of the task's plan; 1: an impossible action; 2: an answer without an action.
    """

    tasks: Sequence[Task] = ()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._answers = {}
        for index, task in enumerate(self.tasks):
            for turn in range(TURNS):
                seed = RolloutId(0, index, 0).request_seed(VALUES["seed"], turn)
                self._answers[seed] = self._answer(index, task.payload["plan"], turn)

    @staticmethod
    def _answer(index: int, plan: list[str], turn: int) -> str:
        if index % 3 == 0:
            return f"<action>{plan[turn]}</action>" if turn < len(plan) else "too late"
        return "<action>fly to moon 1</action>" if index % 3 == 1 else "hm"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def complete(self, messages: Sequence[dict[str, Any]], sampling: object, seed: int) -> Completion:
        return reply([], self._answers[seed], seed)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    machine = make_machine(store=tmp_path_factory.mktemp("tasks"), workers__environments=1)
    return run_stage("tasks", EnvironmentSettings.model_validate(ENVIRONMENT), {}, machine)


def evaluated(tasks: Artifact, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    letters = {chr(code): code for code in range(256)} | {"<end>": 256}
    Tokenizer(WordLevel(letters, "<end>")).save(str(folder / "tokenizer.json"))
    ScriptedServers.tasks = [*load_tasks(tasks.path, "heldout"), *load_tasks(tasks.path, "train")]
    monkeypatch.setattr("armature.components.inference.pool.ServerPool", ScriptedServers)
    evaluation = VALUES | {"splits": ["heldout", "train"], "kind_field": "kind", "success_reward": 10.0}
    settings = EvaluateStageSettings.model_validate({"evaluation": evaluation, "inference": INFERENCE})
    model = Artifact(kind="model", path=folder, digest="0")
    machine = make_machine(store=folder / "store", workers__environments=1)
    return run_stage("evaluate", settings, {"tasks": tasks, "model": model}, machine).path


def test_evaluation_in_alfworld_is_complete_and_reproducible(tasks, tmp_path, monkeypatch):
    made = evaluated(tasks, tmp_path / "first", monkeypatch)
    rows = read_table(made / RESULTS_FILE, RESULTS).to_pylist()
    heldout, train = load_tasks(tasks.path, "heldout"), load_tasks(tasks.path, "train")
    assert [row["task_id"] for row in rows] == [task.task_id for task in (*heldout, *train)]
    assert len({task.payload["game"] for task in heldout}) == 12 and not any(row["failure"] for row in rows)
    for index, row in enumerate(rows):
        won, flew = index % 3 == 0, index % 3 == 1
        assert (row["solved"], row["truncated"]) == (won, False), row["task_id"]
        assert row["turns"] == (len((*heldout, *train)[index].payload["plan"]) if won else TURNS)
        assert row["inadmissible_actions"] == (TURNS if flew else 0)
        assert row["format_errors"] == (0 if won or flew else TURNS)

    numbers = json.loads((made / "metrics.json").read_text())
    assert (numbers["accuracy"], numbers["tasks"], numbers["train"]["tasks"]) == (4 / 12, 12, 3)
    assert numbers["accuracy_low"] == pytest.approx(wilson_interval(4, 12).low)
    assert numbers["train"]["accuracy"] == pytest.approx(1 / 3)
    assert numbers["inadmissible_actions"] == numbers["format_errors"] == pytest.approx(4 * TURNS / 12)
    by_kind = {kind: [index % 3 == 0 for index, t in enumerate(heldout) if t.payload["kind"] == kind] for kind in KINDS}
    assert {kind: each["accuracy"] for kind, each in numbers["kinds"].items()} == {
        kind: sum(wins) / len(wins) for kind, wins in by_kind.items()
    }
    page = (made / "report.html").read_text()
    assert "By kind of task, heldout" in page and "inadmissible actions per episode" in page
    assert all(task.task_id in page for task in (*heldout, *train)) and "data:image/png;base64," in page
    assert re.search(r'"state": ?"You arrive at', page), "the engine's message is not shown beside each answer"

    again = evaluated(tasks, tmp_path / "second", monkeypatch)
    assert read_table(again / RESULTS_FILE, RESULTS).to_pylist() == rows
    assert json.loads((again / "metrics.json").read_text()) == numbers
