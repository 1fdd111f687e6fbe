"""Modules beside a recipe: found without being installed, and never in place of another module."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from armature.components.artifacts.sources import code_digest
from armature.components.machine.project import load_object, project, project_folder, project_path, project_source
from tests.refusals import refused

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def beside(tmp_path) -> Iterator[Path]:
    """A recipe's folder with a reward, the modules that the reward imports, and an unrelated module."""
    files = {
        "own_reward.py": "from own_helper import size\n\n\ndef short(answer):\n    from own_rules.words import MOST\n"
        "    return float(size(answer) < MOST)\n",
        "own_helper.py": "def size(text):\n    return len(text)\n",
        "own_rules/__init__.py": "",
        "own_rules/words.py": "from . import number\nMOST = number.MOST\n",
        "own_rules/number.py": "MOST = 4\n",
        "own_other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with project(tmp_path):
        yield tmp_path


def test_loads_function_beside_recipe_with_its_imports(beside):
    short = load_object("own_reward:short", "reward")
    assert (short("red"), short("purple")) == (1.0, 0.0)
    assert str(beside) not in sys.path
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("own_other")


def test_child_process_loads_project_modules(beside):
    code = "from armature.components.machine import project as p; print(p.load_object('own_reward:short', '')('red'))"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr
    assert not list(beside.rglob("__pycache__/own_r*"))


@pytest.mark.parametrize("name", ["json", "tomllib", "yaml", "armature", "google"])
def test_rejects_project_module_with_a_used_name(beside, name):
    before = sys.modules.get(name)
    (beside / f"{name}.py").write_text("raise AssertionError('imported')\n")
    with refused("module_name_taken", beside / f"{name}.py", f"my_{name}.py"):
        load_object(f"{name}:short", "reward")
    assert sys.modules.get(name) is before
    (beside / "own_helper.py").write_text(f"import {name}\n")
    with refused("module_name_taken", beside / f"{name}.py"):
        load_object("own_reward:short", "reward")


def test_each_recipe_has_its_own_modules(tmp_path):
    result = []
    for number in (1, 2, 1):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        (folder / "own_scores.py").write_text(f"def score():\n    return {number}\n")
        with project(folder):
            result.append(load_object("own_scores:score", "reward")())
    assert result == [1, 2, 1]


def test_recipe_in_a_clone_does_not_import_the_project_twice(tmp_path):
    """Otherwise each class of the project would exist twice, and `issubclass` would compare different ones."""
    (tmp_path / "own_scores.py").write_text("SCORE = 1\n")
    code = (
        "import sys; from pathlib import Path; from armature.components.contracts import errors\n"
        "from armature.components.machine.project import load_object, project\n"
        f"clone, names = {str(REPOSITORY)!r}, ['armature.components.contracts.errors:said', 'tests.refusals:refused']\n"
        f"for folder, name in [*((clone, name) for name in names), ({str(tmp_path)!r}, 'own_scores:SCORE')]:\n"
        "    with project(Path(folder)): load_object(name, '')\n"
        "sys.exit(sys.modules.get(errors.__name__) is not errors)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=False)
    assert done.returncode == 0


def test_edit_with_equal_size_and_time_is_detected(tmp_path):
    """Python itself takes the old bytecode then."""
    file = tmp_path / "mine/own_scores.py"
    for folder in ("mine", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_scores.py").write_text("SCORE = 1\n")
    for expected in (1, 2):
        file.write_text(f"SCORE = {expected}\n")
        os.utime(file, (1, 1))
        with project(tmp_path / "mine"):
            assert load_object("own_scores:SCORE", "reward") == expected
        with project(tmp_path / "other"):
            load_object("own_scores:SCORE", "reward")


@pytest.mark.parametrize("name", ["own_reward.py", "own_helper.py", "own_rules/number.py"])
def test_edit_counts_from_the_next_recipe_load(beside, name):
    """An edit changes both the loaded function and the digest of the code, as in a notebook."""
    before, digest = load_object("own_reward:short", "reward"), code_digest("own_reward")
    assert load_object("own_reward:short", "reward") is before and code_digest("own_reward") == digest
    assert before("purple") == 0.0
    text = (beside / name).read_text()
    (beside / name).write_text(text.replace("4", "9").replace("len(text)", "0").replace("float(", "float(0 * "))
    after = load_object("own_reward:short", "reward")
    assert after("red") + after("purple") != 1.0 and code_digest("own_reward") != digest


@pytest.mark.parametrize(
    ("name", "text", "code", "values"),
    [
        ("own_missing:short", "", "module_missing", ["own_missing.py"]),
        ("own_folder.words:short", "", "module_missing", ["own_folder/__init__.py"]),
        ("own_bad:short", "def short(:\n", "name_not_loadable", ["SyntaxError", "own_bad.py, line 1"]),
        ("own_bad:short", "import sys\nsys.exit(3)\n", "name_not_loadable", ["SystemExit: 3", "own_bad.py, line 2"]),
        ("own_bad:short", "import own_missing\n", "name_not_loadable", ["own_missing", "own_bad.py, line 1"]),
        ("own_bad:short", "\nlong = 1\n", "name_not_in_module", ["short", "own_bad.py"]),
        ("own_bad:", "", "name_not_in_module", ["own_bad.py"]),
        ("os.path:nothing", "", "name_not_in_module", ["nothing"]),
        ("..:a", "", "name_not_loadable", []),
    ],
)
def test_unloadable_function_is_an_error(beside, name, text, code, values):
    (beside / "own_folder").mkdir()
    (beside / "own_bad.py").write_text(text)
    with refused(code, *values):
        load_object(name, "reward")


def test_relative_paths_start_at_the_recipe_folder(beside, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert project_path("own_rules/words.py").is_file() and project_path("/etc") == Path("/etc")
    assert project_source("own_rules") == str(beside / "own_rules") and project_source("org/model") == "org/model"
    with project(None):
        assert project_folder() == Path() and project_path("a") == Path("a")
    assert project_folder() == beside
