"""Sources of environments: digests of their code and data, which are part of the fingerprint of each playing stage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from armature.components.artifacts.sources import _files, code_digest
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.alfworld.games.folders import games_digest
from armature.components.environments.alfworld.games.game import FolderGames
from armature.components.environments.alfworld.games.generate import games_sources
from tests.vlm.sft.test_warm_start import VALUES as WARM_START

REPOSITORY = Path(__file__).resolve().parents[2]

PACKAGE = {
    "shapes_lab/__init__.py": "",
    "shapes_lab/envs/__init__.py": "",
    "shapes_lab/envs/shapes.py": """
from typing import Any
from pydantic import Field
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.settings import Settings
from armature.components.environments.generated import GeneratedEnvironment


class ShapesSettings(Settings):
    words: str = Field(description="A file of words.")
    weight: float = Field(description="Reward.")


class Shapes(GeneratedEnvironment[ShapesSettings]):
    name = "shapes"
    Settings = ShapesSettings
    max_turns = 1
    reward_weights = {"correct": 1.0}

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return {"shape": ["circle", "square"][index % 2], "seed": seed}

    def episode(self, task: Task) -> "ShapesEpisode":
        return ShapesEpisode(task)


class ShapesEpisode:
    def __init__(self, task: Task) -> None:
        self._task = task

    async def reset(self) -> Observation:
        return Observation(("Which shape?",))

    async def step(self, action: str) -> Outcome:
        from ..rewards.match import reward
        return Outcome(None, {"correct": reward(action, self._task.payload["shape"])})

    async def close(self) -> None: ...
""",
    "shapes_lab/rewards/__init__.py": "",
    "shapes_lab/rewards/match.py": """
from pathlib import Path
import shapes_helper
SYNONYMS = Path(__file__).parent / "data" / "synonyms.json"


def reward(answer: str, shape: str) -> float:
    return float(shapes_helper.clean(answer) == shape)
""",
    "shapes_lab/rewards/data/synonyms.json": "{}",
    "shapes_helper.py": "def clean(text):\n    return text.strip()\n",
    "unrelated.py": "VALUE = 1\n",
    "shapes_lab-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: shapes-lab\nVersion: 1.0\n",
    "shapes_lab-1.0.dist-info/entry_points.txt": "[armature.environments]\nshapes = shapes_lab.envs.shapes:Shapes\n",
}

PRINT = """
import json, sys
from pathlib import Path
from armature.components.configuration import load_recipe
from armature.components.contracts.stages import Artifact
from armature.components.configuration.stages import STAGES, fingerprint

root, warm_start = Path(sys.argv[1]), sys.argv[2]
args = '{words = "words/list.txt", weight = 1.0}'
overrides = ["environment.name=shapes", "environment.args=", f"environment.args={args}"]
recipe = load_recipe("train-vlm/colors", overrides)
(root / "tasks").mkdir(exist_ok=True)
(root / "tasks/environment.json").write_text(recipe.sections["environment"].model_dump_json())
inputs = {name: Artifact(kind=name, path=root / name, digest=name) for name in ("tasks", "model")}
from armature.components.vlm.settings import WarmStartStageSettings, WarmStartSettings
settings = {name: recipe.settings_for(STAGES[name].settings) for name in ("tasks", "train-vlm", "evaluate")}
settings["warm-start"] = WarmStartStageSettings(
    model=recipe.sections["model"], warm_start=WarmStartSettings.model_validate(json.loads(warm_start))
)
prints = {name: fingerprint(STAGES[name], each, {key: inputs[key] for key in STAGES[name].inputs})
          for name, each in settings.items()}
print(json.dumps(prints))
"""


def write(root: Path) -> Path:
    for name, content in PACKAGE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "words").mkdir()
    (root / "words/list.txt").write_text("circle\nsquare\n")
    return root


def fingerprints(root: Path) -> dict[str, str]:
    path = os.pathsep.join([str(root), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-c", PRINT, str(root), json.dumps(WARM_START)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "ARMATURE_CACHE": str(root / ".cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / name).read_text()
        assert before in text
        (root / name).write_text(text.replace(before, after))

    return change


def test_environment_code_and_data_change_every_playing_stage(tmp_path):
    """Each change is made in a new copy of the package, so that paths and times must not matter."""
    first = fingerprints(write(tmp_path / "first"))
    assert set(first) == {"tasks", "train-vlm", "evaluate", "warm-start"}
    changes = {
        "a copy elsewhere": lambda root: None,
        "other code": edit("unrelated.py", "1", "2"),
        "the environment": edit("shapes_lab/envs/shapes.py", "Which shape?", "What shape?"),
        "its rewards": edit("shapes_lab/rewards/match.py", "float(", "2.0 * ("),
        "a module beside the package": edit("shapes_helper.py", "strip", "lstrip"),
        "data of the package": edit("shapes_lab/rewards/data/synonyms.json", "{}", '{"disc": "circle"}'),
        "data that the arguments name": edit("words/list.txt", "circle", "disc"),
    }
    same = {"a copy elsewhere", "other code"}
    for number, (what, change) in enumerate(changes.items()):
        root = write(tmp_path / f"copy{number}")
        change(root)
        (root / "shapes_lab/__pycache__").mkdir(exist_ok=True)
        changed = fingerprints(root)
        if what in same:
            assert changed == first, what
        else:
            assert all(changed[stage] != first[stage] for stage in first), what


def test_code_digest_covers_the_loaded_version_of_a_module(tmp_path, monkeypatch):
    root = write(tmp_path / "package")
    monkeypatch.syspath_prepend(str(root))
    import shapes_helper

    before = code_digest("shapes_helper")
    (root / "shapes_helper.py").write_text("def clean(text):\n    return text.lower()\n")
    assert shapes_helper.clean(" A") == "A" and code_digest("shapes_helper") == before
    del sys.modules["shapes_helper"]
    assert code_digest("shapes_helper") != before


def test_games_sources_use_files_or_the_pinned_digest(tmp_path):
    games = tmp_path / "games/train/task/trial"
    games.mkdir(parents=True)
    (games / "game.tw-pddl").write_text("{}")
    (games / "traj_data.json").write_text("{}")
    pinned = games_digest(tmp_path / "games")
    settings = FolderGames(source="folder", path=str(tmp_path / "games"), digest=pinned)
    as_made = games_sources(settings)
    assert as_made["games"] == pinned
    (games / "game.tw-pddl").write_text("{} ")
    assert games_sources(settings) != as_made
    shutil.rmtree(tmp_path / "games")
    assert games_sources(settings) == as_made


@pytest.mark.parametrize("name", ["colors", "recall", "coordinates"])
def test_built_in_environment_digest_covers_only_imported_modules(name):
    files = _files(ENVIRONMENTS[name].__module__)
    assert f"armature.components.environments.{name}" in files and "armature.components.environments.generated" in files
    assert not any("alfworld" in file or "libero" in file for file in files)


def test_code_digest_covers_namespace_packages(tmp_path, monkeypatch):
    deep = tmp_path / "plain_lab/envs/deep"
    deep.mkdir(parents=True)
    (deep / "shapes.py").write_text("VALUE = 1\n")
    (tmp_path / "plain_lab/main.py").write_text("from plain_lab.envs.deep import shapes\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_digest("plain_lab.main")
    (deep / "shapes.py").write_text("VALUE = 2\n")
    assert code_digest("plain_lab.main") != before


def test_code_digest_skips_installed_packages(tmp_path, monkeypatch):
    target, mine = tmp_path / "target", tmp_path / "mine"
    (target / "bought-1.0.dist-info").mkdir(parents=True)
    (target / "bought-1.0.dist-info/RECORD").write_text("bought.py,sha256=x,9\nbought-1.0.dist-info/RECORD,,\n")
    (target / "bought.py").write_text("VALUE = 1")
    mine.mkdir()
    (mine / "own_rules.py").write_text(f"import bought\nTEXT = {'語' * 200!r}  # longer than a file's name can be\n")
    for folder in (target, mine):
        monkeypatch.syspath_prepend(str(folder))
    before = code_digest("own_rules")
    (target / "bought.py").write_text("VALUE = 2")
    assert code_digest("own_rules") == before
    (mine / "own_rules.py").write_text("import bought")
    assert code_digest("own_rules") != before
