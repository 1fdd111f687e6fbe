"""Names of columns: found in every Unicode form, and whatever characters they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.components.environments.dataset.template import parse_template
from armature.components.registry import suggestion
from tests.refusals import refused

from .test_values import environment_of, played

NAME = "Fr\u00e4ge \u1e69"  # two characters that have other forms, one of them of three characters
FORMS = [normalize("NFC", NAME), normalize("NFD", NAME)]


def write(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> str:
    name = f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    elif suffix == "csv":
        lines = [list(rows[0]), *(row.values() for row in rows)]
        (folder / name).write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    else:
        (folder / name).write_text("\n".join(map(json.dumps, rows)) if suffix == "jsonl" else json.dumps(rows))
    return name


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "csv"])
@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("written", FORMS)
def test_a_column_is_found_in_every_form(stored: str, written: str, suffix: str, tmp_path: Path) -> None:
    source = write(tmp_path, suffix, [{stored: f"x{n}", "s": stored if n % 2 else "other"} for n in range(8)])
    split = {"by": "column", "column": "s", "train": written, "heldout": "other"}
    filters = [{"column": written, "operator": "!=", "value": "x0"}]
    where = {"answer": written, "kind": written, "split": split, "filters": filters}
    environment = environment_of(tmp_path, source, prompt=f"{{{written}}}", system=f'{{"{written}"}}', **where)
    assert sorted(played(environment, lambda text: text)) == [(f"x{n}", 1.0) for n in range(1, 8)]


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_columns_that_look_the_same_are_refused_and_told_apart(suffix: str, tmp_path: Path) -> None:
    source = write(tmp_path, suffix, [dict.fromkeys(FORMS, "x")] * 8)
    with refused("column_repeated", *map(ascii, FORMS)):
        environment_of(tmp_path, source, prompt=f"{{{NAME}}}", answer="")


def test_a_line_with_two_names_that_look_the_same_is_left_out(tmp_path: Path) -> None:
    rows = [dict.fromkeys(FORMS, "x"), *({form: f"{form} {n}"} for n in range(8) for form in FORMS)]
    environment = environment_of(tmp_path, write(tmp_path, "jsonl", rows), prompt=f"{{{NAME}}}", answer=NAME)
    assert len(played(environment, lambda text: text)) == 16 and environment.drops == {"unreadable": 1}


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), st.integers(0, 20))
def test_every_name_can_be_quoted(name: str, item: int) -> None:
    quoted = json.dumps(name)
    row = {normalize("NFC", name): [f"v{n}" for n in range(21)]}
    for template, shown in ((f"a{{{quoted}[{item}]}}b", f"av{item}b"), (f"{{{{{{{quoted}}}}}}}", None)):
        filled = "".join(map(str, parse_template(template).fill(row)))
        assert filled == (shown or "{" + "\n".join(f"{chr(65 + n)}. v{n}" for n in range(21)) + "}")


@pytest.mark.parametrize(
    ("template", "row", "shown"),
    [
        ('{"image"}{"images"}', {"image": "a", "images": "b"}, "ab"),
        ("{q[0]}", {"q[0]": "whole"}, "whole"),
        ("{q[0]}", {"q": ["item"]}, "item"),
        ("{q[0]}", {"q": ["item"], "q[0]": "whole"}, "whole"),
        ('{"q[0]"}', {"q": ["item"], "q[0]": "whole"}, "whole"),
        ('{"q"[0]}', {"q": ["item"], "q[0]": "whole"}, "item"),
        ("{q{1}}", {"q{1}": "x"}, "x"),
        ('{"{"}{"}"}', {"{": "a", "}": "b"}, "ab"),
        (r'{"a\"b"}{"a\\b"}{"\u00e4"}', {'a"b': "x", "a\\b": "y", "\u00e4": "z"}, "xyz"),
    ],
)
def test_columns_are_named(template: str, row: dict[str, Any], shown: str) -> None:
    assert "".join(map(str, parse_template(template).fill(row))) == shown


@pytest.mark.parametrize(
    "template", ['{"a"b}x{', "{q{1}", "{q}}", "{", "}", "{}", "a {b} }", "{a{b}", '{"\\x"}', '{"a"[12345]}{']
)
def test_damaged_places_are_refused(template: str) -> None:
    with pytest.raises(ValueError):
        parse_template(template)


def test_a_quoted_item_needs_its_column(tmp_path: Path) -> None:
    source = write(tmp_path, "jsonl", [{"q[0]": "x", "a": "x"}] * 8)
    with refused("unknown_column", "'q'"):
        list(environment_of(tmp_path, source, prompt='{"q"[0]}').tasks("train"))


@pytest.mark.parametrize(
    ("name", "known", "apart"),
    [
        (FORMS[0], FORMS[1], True),
        ("\u0430nswer", "answer", True),  # the first letter is Cyrillic
        ("\uff41nswer", "answer", True),  # and here of full width
        ("Gr\u00f6sse", "Gr\u00f6\u00dfe", False),
        ("anser", "answer", False),
    ],
)
def test_a_suggestion_tells_names_apart_that_look_the_same(name: str, known: str, apart: bool) -> None:
    assert (ascii(name) in suggestion(name, [known]) and ascii(known) in suggestion(name, [known])) is apart
