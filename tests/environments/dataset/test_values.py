"""Values of tables in every file format, and names of columns in every Unicode form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.components.environments.dataset.environment import DatasetEnvironment
from armature.components.environments.dataset.template import parse_template
from armature.components.environments.dataset.values import column_values
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.machine.project import project
from armature.components.machine.registry import suggestion
from tests.refusals import refused

from .tables import tasks_of

NUMBERS = list(range(24))
Row = dict[str, Any]


def _parquet(kind: pa.DataType) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        made = pa.array([Decimal(each) if pa.types.is_decimal(kind) else each for each in NUMBERS], kind)
        listed = pa.array([[each, each + 0.5] for each in NUMBERS], pa.list_(pa.float32()))
        pq.write_table(pa.table({"q": NUMBERS, "a": made, "l": listed}), folder / "rows.parquet")
        return "rows.parquet"

    return write


def _pandas(suffix: str) -> Callable[[Path], str]:
    """Write with pandas, which makes a column of whole numbers with a missing one a column of floats."""

    def write(folder: Path) -> str:
        table = pd.DataFrame({"q": NUMBERS, "a": NUMBERS}).astype({"a": "object"})
        table.loc[24] = [24, None]
        table = table.astype({"a": "float64"})
        table["l"] = [json.dumps([each, each + 0.5]) if suffix == "csv" else [each, each + 0.5] for each in table["q"]]
        getattr(table, f"to_{suffix}")(folder / f"rows.{suffix}", index=False)
        return f"rows.{suffix}"

    return write


def _json(suffix: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        rows = [{"q": each, "a": float(each), "l": [float(each), each + 0.5]} for each in NUMBERS]
        text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows))
        (folder / f"rows.{suffix}").write_text(text)
        return f"rows.{suffix}"

    return write


def _saved(folder: Path) -> str:
    import datasets

    of = datasets.Features({"q": datasets.Value("int64"), "a": datasets.Value("float32")})
    of["l"] = datasets.Sequence(datasets.Value("float16"))
    rows = [{"q": each, "a": each, "l": [each, each + 0.5]} for each in NUMBERS]
    datasets.Dataset.from_list(rows, features=of).save_to_disk(str(folder / "saved"))
    return "saved"


FORMS: dict[str, Callable[[Path], str]] = {
    **{str(kind): _parquet(kind) for kind in (pa.float64(), pa.float32(), pa.float16(), pa.decimal128(9, 3))},
    "int64": _parquet(pa.int64()),
    "pandas parquet": _pandas("parquet"),
    "pandas csv": _pandas("csv"),
    "jsonl": _json("jsonl"),
    "json": _json("json"),
    "saved by datasets": _saved,
}


IN_PROCESSES = ("pandas parquet", "jsonl")
"""Formats that are graded in worker processes too, which take a second to start."""


def environment_of(folder: Path, source: str, **args: Any) -> DatasetEnvironment:
    args = {"answer": "a", "prompt": "{q}", "split": {"by": "hash", "heldout": 0.5}, "on_bad_row": "skip", **args}
    args.setdefault("rewards", [{"name": "exact_match"}])
    environment = make_environment(EnvironmentSettings(name="dataset", args={"source": str(folder / source), **args}))
    assert isinstance(environment, DatasetEnvironment)
    return environment


def played(environment: DatasetEnvironment, completion: Callable[[str], str]) -> list[tuple[str, float]]:
    """Play every task with the answer `completion(first word of the prompt)`; return prompts and sums of rewards."""

    async def play(task: Any) -> tuple[str, float]:
        episode = environment.episode(task)
        prompt = "".join(map(str, (await episode.reset()).content))
        outcome = await episode.step(completion(prompt.split()[0]))
        return prompt, sum(outcome.reward_parts.values())

    return [asyncio.run(play(task)) for split in ("train", "heldout") for task in environment.tasks(split)]


@pytest.mark.parametrize("form", FORMS)
def test_whole_numbers_are_integers_in_every_format(form: str, tmp_path: Path) -> None:
    source = FORMS[form](tmp_path)
    (tmp_path / "grade.py").write_text("def grade(completion, answer, row):\n    return repr(answer) == completion\n")
    rewards: list[Row] = [{"name": "exact_match"}, {"name": "number"}]
    if form in IN_PROCESSES:
        rewards += [{"name": "regex", "pattern": r"\d+", "group": 0}, {"name": "function", "function": "grade:grade"}]
    with project(tmp_path):
        environment = environment_of(tmp_path, source, prompt="{q} of {a}", kind="a", rewards=rewards)
        games = played(environment, lambda number: number)
        assert sorted(games) == sorted((f"{each} of {each}", float(len(rewards))) for each in NUMBERS)
        task = next(iter(environment.tasks("train")))
        prompt = "".join(map(str, asyncio.run(environment.episode(task).reset()).content))
        assert task.payload["kind"] == prompt.split()[0] == environment.demonstration(task)[0]
        environment.close()
        letters = environment_of(tmp_path, source, rewards=[{"name": "choice", "choices": 26}])
        assert [grade for _, grade in played(letters, lambda number: chr(65 + int(number)))] == [1.0] * len(NUMBERS)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "pandas csv"])
def test_list_numbers_keep_digits_of_their_type(form: str, tmp_path: Path) -> None:
    environment = environment_of(tmp_path, FORMS[form](tmp_path), prompt="{q}\n{l}")
    for prompt, _ in played(environment, lambda number: number):
        number = prompt.split()[0]
        assert prompt == f"{number}\nA. {number}\nB. {number}.5"


ARROW = pa.struct([("half", pa.float16()), ("many", pa.list_(pa.map_(pa.string(), pa.float32())))])


@pytest.mark.parametrize(
    ("values", "kind", "plain"),
    [
        ([np.float16(0.1), None], pa.float16(), [0.1, None]),
        ([0.1, 1e-7, 16777216.0, float("nan"), float("inf")], pa.float32(), [0.1, 1e-7, 16777216, None, None]),
        ([[0.1], None, []], pa.list_(pa.float32()), [[0.1], None, []]),
        ([[0.1, 0.2]], pa.list_(pa.float32(), 2), [[0.1, 0.2]]),
        ([{"half": np.float16(2.0), "many": [[("k", 0.3)]]}, None], ARROW, [{"half": 2, "many": [[["k", 0.3]]]}, None]),
        ([Decimal("1.50"), Decimal("2.00")], pa.decimal128(5, 2), [1.5, 2]),
        ([Decimal("0.1234567890123456789")], pa.decimal128(20, 19), ["0.1234567890123456789"]),
        ([date(2024, 2, 29), None], pa.date32(), ["2024-02-29", None]),
        ([timedelta(seconds=61)], pa.duration("s"), ["0:01:01"]),
        ([b"\0", None], pa.large_binary(), [b"\0", None]),
        (["a", None], pa.dictionary(pa.int32(), pa.string()), ["a", None]),
        ([2.0**53, -0.0], pa.float64(), [2.0**53, 0]),
    ],
)
def test_column_values_are_plain(values: list[Any], kind: pa.DataType, plain: list[Any]) -> None:
    result = column_values(pa.chunked_array([pa.array(values, kind)]))
    assert result == plain and list(map(type, result)) == list(map(type, plain))


MISSING = [float("nan"), float("inf"), float("-inf"), None]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({"prompt": "{q} {v}"}, "no_text"),
        ({"prompt": "{q} {list[0]}"}, "no_text"),
        ({"prompt": "{q}{list}"}, "no_text"),
        ({"system": "{v}"}, "no_text"),
        ({"demonstration": "{v}"}, "no_text"),
        ({"answer": "v"}, "no_answer"),
        ({"answer": "list"}, "bad_answer"),
        ({"kind": "v"}, "no_kind"),
        ({"split": {"by": "column", "column": "v", "train": "1", "heldout": "2"}}, "no_split"),
        ({"split": {"by": "hash", "heldout": 0.5, "group": "v"}}, "no_group"),
        ({"filters": [{"column": "v", "operator": "!=", "value": 7}]}, "filtered"),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_missing_numbers_make_bad_rows(place: Row, reason: str, suffix: str, tmp_path: Path) -> None:
    values = [1.0, 2.0] * 6 + MISSING
    rows = [{"q": f"question {n}", "a": "a", "v": value, "list": [value]} for n, value in enumerate(values)]
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    else:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = environment_of(tmp_path, f"rows.{suffix}", **place)
    assert len(tasks_of(environment)) == 12 and environment.drops == {reason: 4}


def test_value_without_python_type_makes_one_bad_row(tmp_path: Path) -> None:
    days = pa.array([0, 10**8, *range(1, 9)], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"q": [f"q{n}" for n in range(10)], "a": days}), tmp_path / "rows.parquet")
    environment = environment_of(tmp_path, "rows.parquet")
    assert len(tasks_of(environment)) == 9
    assert environment.drops == {"unreadable": 1}


NAME = "Fr\u00e4ge \u1e69"  # two characters have other Unicode forms, one of them of three characters
UNICODE = [normalize("NFC", NAME), normalize("NFD", NAME)]


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
@pytest.mark.parametrize("stored", UNICODE)
@pytest.mark.parametrize("written", UNICODE)
def test_column_names_match_in_every_unicode_form(stored: str, written: str, suffix: str, tmp_path: Path) -> None:
    source = write(tmp_path, suffix, [{stored: f"x{n}", "s": stored if n % 2 else "other"} for n in range(8)])
    split = {"by": "column", "column": "s", "train": written, "heldout": "other"}
    filters = [{"column": written, "operator": "!=", "value": "x0"}]
    where = {"answer": written, "kind": written, "split": split, "filters": filters}
    environment = environment_of(tmp_path, source, prompt=f"{{{written}}}", system=f'{{"{written}"}}', **where)
    assert sorted(played(environment, lambda text: text)) == [(f"x{n}", 1.0) for n in range(1, 8)]


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_rejects_columns_with_equal_normalized_names(suffix: str, tmp_path: Path) -> None:
    source = write(tmp_path, suffix, [dict.fromkeys(UNICODE, "x")] * 8)
    with refused("column_repeated", *map(ascii, UNICODE)):
        environment_of(tmp_path, source, prompt=f"{{{NAME}}}", answer="")


def test_line_with_equal_normalized_names_is_a_bad_row(tmp_path: Path) -> None:
    rows = [dict.fromkeys(UNICODE, "x"), *({form: f"{form} {n}"} for n in range(8) for form in UNICODE)]
    environment = environment_of(tmp_path, write(tmp_path, "jsonl", rows), prompt=f"{{{NAME}}}", answer=NAME)
    assert len(played(environment, lambda text: text)) == 16 and environment.drops == {"unreadable": 1}


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), st.integers(0, 20))
def test_template_can_quote_any_column_name(name: str, item: int) -> None:
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
def test_template_refers_to_columns(template: str, row: dict[str, Any], shown: str) -> None:
    assert "".join(map(str, parse_template(template).fill(row))) == shown


@pytest.mark.parametrize(
    "template", ['{"a"b}x{', "{q{1}", "{q}}", "{", "}", "{}", "a {b} }", "{a{b}", '{"\\x"}', '{"a"[12345]}{']
)
def test_rejects_malformed_templates(template: str) -> None:
    with pytest.raises(ValueError):
        parse_template(template)


def test_quoted_item_requires_its_column(tmp_path: Path) -> None:
    source = write(tmp_path, "jsonl", [{"q[0]": "x", "a": "x"}] * 8)
    with refused("unknown_column", "'q'"):
        list(environment_of(tmp_path, source, prompt='{"q"[0]}').tasks("train"))


@pytest.mark.parametrize(
    ("name", "candidate", "escaped"),
    [
        (UNICODE[0], UNICODE[1], True),
        ("\u0430nswer", "answer", True),  # the first letter is Cyrillic
        ("\uff41nswer", "answer", True),  # and here of full width
        ("Gr\u00f6sse", "Gr\u00f6\u00dfe", False),
        ("anser", "answer", False),
    ],
)
def test_suggestion_escapes_names_that_look_equal(name: str, candidate: str, escaped: bool) -> None:
    text = suggestion(name, [candidate])
    assert (ascii(name) in text and ascii(candidate) in text) is escaped
