"""Held-out rows, the order of tasks, and filters."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from armature.components.environments.dataset.environment import DatasetEnvironment
from tests.refusals import refused

from .tables import environment_of, write_jsonl

Row = dict[str, Any]


def table(path: Path, rows: list[Row], **changes: Any) -> DatasetEnvironment:
    write_jsonl(path, rows)
    return environment_of(
        {"source": str(path)}, **{"prompt": "{q}", "images": [], "answer": "a", "kind": "", **changes}
    )


def questions(environment: DatasetEnvironment, split: Any, path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [rows[task.payload["row"]]["q"] for task in environment.tasks(split)]


def rows_of(count: int) -> list[Row]:
    return [{"q": f"question {n}", "a": "yes", "group": f"g{n % 40}", "n": n} for n in range(count)]


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_hash_split_has_its_share_and_no_overlap(share: float, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    environment = table(path, rows_of(2000), split={"by": "hash", "heldout": share})
    train, heldout = (questions(environment, split, path) for split in ("train", "heldout"))
    assert abs(len(heldout) - 2000 * share) < 4 * math.sqrt(2000 * share * (1 - share))  # four standard deviations
    assert sorted(train + heldout) == sorted(row["q"] for row in rows_of(2000))


def test_splits_are_independent_of_row_order_and_seed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    shuffled = rows_of(300)
    random.Random(1).shuffle(shuffled)
    splits = []
    for rows, seed in ((rows_of(300), 0), (shuffled, 0), (rows_of(300), 1), ([*rows_of(300), *rows_of(310)[300:]], 0)):
        environment = table(path, rows, seed=seed)
        splits.append([questions(environment, split, path) for split in ("train", "heldout")])
    first, reordered, seeded, longer = splits
    assert reordered == first
    assert seeded[0] != first[0] and [sorted(each) for each in seeded] == [sorted(each) for each in first]
    assert set(first[0]) <= set(longer[0]) and set(first[1]) <= set(longer[1])
    in_file_order = questions(table(path, rows_of(300), shuffle=False), "train", path)
    assert in_file_order == sorted(in_file_order, key=lambda q: int(q.split()[1]))


def test_changed_answer_keeps_row_in_its_split(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = sorted(questions(table(path, rows_of(300)), "heldout", path))
    assert sorted(questions(table(path, [{**row, "a": "no"} for row in rows_of(300)]), "heldout", path)) == first


def test_group_stays_in_one_split(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.jsonl", rows_of(800)
    environment = table(path, rows, split={"by": "hash", "heldout": 0.25, "group": "group"})
    groups = {
        split: {int(q.split()[1]) % 40 for q in questions(environment, split, path)} for split in ("train", "heldout")
    }
    assert groups["train"].isdisjoint(groups["heldout"]) and len(groups["train"] | groups["heldout"]) == 40


def test_column_split_counts_rows_with_other_values(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{**row, "split": ["train", "train", "validation", "odd"][row["n"] % 4]} for row in rows_of(40)]
    environment = table(path, rows, split={"by": "column", "heldout": ["validation", "test"]})
    assert {int(q.split()[1]) % 4 for q in questions(environment, "heldout", path)} == {2}
    assert {int(q.split()[1]) % 4 for q in questions(environment, "train", path)} == {0, 1}
    assert environment.drops == {"other_split": 10}


def test_name_split_uses_separate_files(tmp_path: Path) -> None:
    for name, start in (("train-0", 0), ("train-1", 10), ("test", 20)):
        write_jsonl(tmp_path / f"{name}.jsonl", rows_of(30)[start : start + 10])
    write_jsonl(tmp_path / "notes.jsonl", rows_of(50)[30:])

    def of(split: Row) -> DatasetEnvironment:
        where = {"source": str(tmp_path)}
        return environment_of(where, prompt="{q}", images=[], answer="a", kind="", split={"by": "name", **split})

    environment = of({"train": "train-*.jsonl", "heldout": "test.jsonl"})
    assert {task.payload["file"] for task in environment.tasks("train")} == {"train-0.jsonl", "train-1.jsonl"}
    assert {task.payload["file"] for task in environment.tasks("heldout")} == {"test.jsonl"}
    assert environment.drops == {}
    with refused("split_missing", "'tets.jsonl'"):
        list(of({"train": "train-*.jsonl", "heldout": "tets.jsonl"}).tasks("train"))
    with refused("split_overlap", "'test.jsonl'"):
        list(of({"train": "*.jsonl", "heldout": "test.jsonl"}).tasks("train"))


def test_hash_split_of_selected_files(tmp_path: Path) -> None:
    for name, rows in (("a", rows_of(60)[:30]), ("b", rows_of(60)[30:]), ("c", rows_of(90)[60:])):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    values: dict[str, Any] = {"prompt": "{q}", "images": [], "answer": "a", "kind": ""}
    split = {"by": "hash", "heldout": 0.3, "of": ["a.jsonl", "b*"], "group": "group"}
    environment = environment_of({"source": str(tmp_path)}, **values, split=split)
    tasks = [*environment.tasks("train"), *environment.tasks("heldout")]
    assert {task.payload["file"] for task in tasks} == {"a.jsonl", "b.jsonl"} and len(tasks) == 60
    with refused("split_missing", "'d'"):
        list(environment_of({"source": str(tmp_path)}, **values, split={**split, "of": "d"}).tasks("train"))


@pytest.mark.parametrize(
    ("each", "passes"),
    [
        (("n", ">=", 7), lambda n: n >= 7),
        (("n", "<", 7.5), lambda n: n < 7.5),
        (("n", "!=", 3), lambda n: n != 3),
        (("n", "in", [1, 2, 3]), lambda n: n in (1, 2, 3)),
        (("text", "not in", ["t1", "t2"]), lambda n: n not in (1, 2)),
        (("text", "==", "t4"), lambda n: n == 4),
        (("number as text", ">", 7), lambda n: n > 7),
        (("large", "==", 2**53 + 1), lambda n: n == 1),
        (("large as text", ">", 2**53 + 1), lambda n: n > 1),
        (("even", "==", True), lambda n: n % 2 == 0),
        (("nothing", "!=", 1), lambda n: False),
    ],
)
def test_filters_select_rows(each: tuple[str, str, Any], passes: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {**row, "text": f"t{n}", "number as text": f"{n}", "even": n % 2 == 0, "nothing": None, "split": s}
        | {"large": 2**53 + n, "large as text": f"{2**53 + n}"}
        for n, row in enumerate(rows_of(12))
        for s in ("train", "test")
    ]
    filters = [dict(zip(("column", "operator", "value"), each, strict=True))]
    environment = table(path, rows, filters=filters, split={"by": "column"})
    expected = {f"question {n}" for n in range(12) if passes(n)}
    if not expected:
        with refused("split_empty", "'filtered': 24"):
            list(environment.tasks("train"))
        return
    assert set(questions(environment, "train", path)) == expected == set(questions(environment, "heldout", path))
    assert environment.drops == {"filtered": 24 - 2 * len(expected)}


@pytest.mark.parametrize(("operator", "value"), [("in", 3), ("==", [3])])
def test_rejects_filter_value_of_wrong_shape(operator: str, value: Any, tmp_path: Path) -> None:
    with refused("value_error", "filters.0", operator):
        table(tmp_path / "r.jsonl", rows_of(3), filters=[{"column": "n", "operator": operator, "value": value}])
