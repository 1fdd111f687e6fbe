"""Examples in docstrings run and print what they show."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from tests.size import ROOT, tracked

PACKAGES = ("armature/*.py", "components/*.py", "tasks/*.py", "flows/*.py", "tests/size.py", "tests/words.py")


def module_name(path: str) -> str:
    """Return the import name of a source file: components/rl/base.py is armature.components.rl.base."""
    inside = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return inside if inside.startswith(("armature", "tests")) else f"armature.{inside}"


WITH_EXAMPLES = sorted(
    module_name(str(path.relative_to(ROOT))) for path in tracked(*PACKAGES) if ">>>" in path.read_text()
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_print_what_they_show(name: str) -> None:
    failed, attempted = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0
    assert attempted > 0
