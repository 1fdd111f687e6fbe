"""The page of error codes is current, and a code belongs to one class of errors."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.error_table import PAGE, all_raised, page


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.error_table"


def test_a_code_belongs_to_one_class() -> None:
    classes = defaultdict(set)
    for error in all_raised():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", error.code)
        classes[error.code].add(error.kind)
    assert {code: kinds for code, kinds in classes.items() if len(kinds) > 1} == {}
