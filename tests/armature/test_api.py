"""The public API: every name is there, documented, typed, and costs nothing until it is used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import armature

ROOT = Path(__file__).resolve().parents[2]
PROMISED = {
    "Environment",
    "Episode",
    "MultimodalAdapter",
    "MultimodalBatch",
    "MultimodalGRPOTrainer",
    "MultimodalRLConfig",
    "RobotPolicy",
    "Task",
    "load_recipe",
    "run_recipe",
}


@pytest.mark.parametrize("name", armature.__all__)
def test_public_name_is_importable_and_documented(name):
    result = getattr(armature, name)
    assert result.__name__ == name and result.__doc__


def test_promised_names_exist_and_unknown_names_raise():
    assert set(armature.__all__) >= PROMISED
    assert set(dir(armature)) >= set(armature.__all__)
    with pytest.raises(AttributeError):
        armature.MultimodalGRPOTrainr  # noqa: B018


def test_api_page_lists_exactly_the_public_names():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(armature.__all__)


def test_type_checkers_see_the_public_names():
    """Imports under TYPE_CHECKING, found by a parser, equal the imports at run time."""
    tree = ast.parse(Path(armature.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.name: node.module for node in imports for alias in node.names}
    assert typed == armature._MODULES and sorted(typed) == sorted(armature.__all__)


def test_import_armature_loads_nothing_heavy():
    script = (
        "import sys, time; began = time.process_time(); import armature; took = time.process_time() - began\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'prefect', 'components'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert took < 0.3, took\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("before", "after"), [(None, "passive"), ("active", "active")])
def test_import_sets_passive_thread_waiting(before, after):
    others = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    script = "import os, armature; print(os.environ['OMP_WAIT_POLICY'])"
    env = others | ({"OMP_WAIT_POLICY": before} if before else {})
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True, env=env)
    assert done.stdout.strip() == after
