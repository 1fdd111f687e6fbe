"""`said` shows an error of a user's code with the place that raised it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from armature.components.contracts.errors import LONGEST_DETAIL, said

MODULE = """
import json

def outer(value):
    return helper(value)

def helper(value):
    if isinstance(value, str):
        return json.loads(value)
    return 1 / value
"""


@pytest.fixture
def users(tmp_path: Path) -> Any:
    """Return a module of a user."""
    (tmp_path / "dividing.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("dividing", tmp_path / "dividing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_of(call: Any, *arguments: Any) -> Exception:
    try:
        call(*arguments)
    except Exception as error:
        return error
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("value", "place"),
    [(0, "dividing.py, line 10: return 1 / value"), ("{", "dividing.py, line 9: return json.loads(value)")],
    ids=["in the user's code", "in a library that it calls"],
)
def test_place_is_the_innermost_line_of_the_users_code(users: Any, value: Any, place: str) -> None:
    error = error_of(users.outer, value)
    assert said(error) == f"{type(error).__name__}: {error} ({place})"


def test_place_of_a_long_message_is_kept(users: Any) -> None:
    class Long:
        def __rtruediv__(self, other: int) -> None:
            raise ValueError("x" * 10_000)

    assert 300 < len(text := said(error_of(users.outer, Long()))) <= LONGEST_DETAIL
    assert text.startswith("ValueError: xxx") and Path(__file__).name in text[-300:]


def test_error_of_libraries_alone_has_no_place() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        assert said(error.with_traceback(None)) == f"JSONDecodeError: {error}"
