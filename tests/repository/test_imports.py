"""No circle of imports, whether at the top of a file, inside a function or under TYPE_CHECKING.

import-linter holds the order of the layers; this holds modules and packages that its contracts do not name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from armature.components.contracts import errors
from armature.components.machine.workers.process import importable

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("armature", "examples")


def import_graph(*packages: str) -> grimp.ImportGraph:
    return grimp.build_graph(*packages, cache_dir=None)


def circle_of_modules(graph: grimp.ImportGraph) -> list[str]:
    """Return the modules of one import cycle, or [] if there is no cycle. A package stands for its `__init__.py`."""
    try:
        TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def circles_of_siblings(graph: grimp.ImportGraph) -> list[tuple[str, str]]:
    """Return the imports that close a cycle between children of the same package. A child package includes all modules
    in it."""
    packages = (name for name in graph.modules if graph.find_children(name))
    return sorted(pair for name in packages for pair in graph.nominate_cycle_breakers(name))


@pytest.fixture(scope="module")
def product() -> grimp.ImportGraph:
    return import_graph(*PRODUCT)


def test_import_check_reads_all_modules(product):
    linked = (f"armature/{name}" for name in ("components", "flows", "tasks"))  # rglob enters no links
    files = (path.relative_to(ROOT) for name in (*PRODUCT, *linked) for path in (ROOT / name).rglob("*.py"))
    parts = [path.parent.parts if path.stem == "__init__" else path.with_suffix("").parts for path in files]
    assert {".".join(one) for one in parts} == product.modules - {"examples"}


@pytest.mark.parametrize("name", ["components", "flows", "tasks"])
def test_linked_folder_is_not_a_second_package(name):
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 1 and b"ImportError" in done.stderr


def test_child_process_imports_the_code_of_its_parent():
    script = "import sys; from armature.components.contracts import errors; print(errors.__file__)"
    script += "; print(sorted({'components', 'flows', 'tasks'} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | importable(), cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == [errors.__file__, "[]", ""]


def test_modules_have_no_circular_imports(product):
    assert circle_of_modules(product) == []


def test_packages_have_no_circular_imports(product):
    assert circles_of_siblings(product) == []


def write_package(root: Path, texts: dict[str, str]) -> None:
    """Write modules with the given texts, by name, below `root`. Each folder becomes a package."""
    for name, text in texts.items():
        file = root / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (file.parent / "__init__.py").touch()
    (root / "__init__.py").touch()


@pytest.mark.parametrize(
    "back",
    [
        "from round_trip.parts.first import ONE",
        "def later():\n    from round_trip.parts.first import ONE",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from round_trip.parts import first",
        "import round_trip.parts.first",
        "from .parts import first",
    ],
)
def test_any_kind_of_import_counts_for_circles(back, tmp_path, monkeypatch):
    texts = {"parts/first": "from round_trip import second", "second": back}
    write_package(tmp_path / "round_trip", texts)
    monkeypatch.syspath_prepend(tmp_path)
    graph = import_graph("round_trip")
    assert sorted(set(circle_of_modules(graph))) == ["round_trip.parts.first", "round_trip.second"]
    assert len(circles_of_siblings(graph)) == 1


def test_package_circle_without_module_circle_is_found(tmp_path, monkeypatch):
    texts = {"a/one": "from two_rooms.b import one", "b/one": "", "b/two": "from two_rooms.a import two", "a/two": ""}
    write_package(tmp_path / "two_rooms", texts)
    monkeypatch.syspath_prepend(tmp_path)
    graph = import_graph("two_rooms")
    assert circle_of_modules(graph) == []
    assert len(circles_of_siblings(graph)) == 1
