"""Tables with hostile types, values and names of columns: each row is a task that shows its value, or is counted."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, hostile_value

NAMES = (
    *("q", "q[0]", "q{1}", "{", "}}", "a]b[", '"', "\\", "image", "images", "Fr\u00e4ge", "Fra\u0308ge", "\u212b"),
    *("a,b", "a\nb", " ", "\0", "\u200b", "name.with.dots", "\U0001f600", "x" * 300, "completion", "__class__"),
)
RESERVED = "<|image_pad|>"
Kind = tuple[pa.DataType, Callable[[random.Random], Any]]


def _number(rng: random.Random) -> float:
    odd = (0.0, -0.0, 22.0, 0.1, 1e20, 1e21, 1e-7, 2.0**53, -1.5, math.nan, math.inf, 1e300, 5e-324, 65504.0)
    return rng.choice(odd) if rng.random() < 0.7 else rng.uniform(-1e4, 1e4)


def _text(rng: random.Random) -> str:
    odd = (
        "red",
        "",
        " ",
        "nan",
        "None",
        "007",
        "1.50",
        "true",
        RESERVED,
        "a\nb",
        '"',
        "\0",
        "e\u0301",
        "[1]",
        "x" * 99,
    )
    return rng.choice(odd)


def _int(rng: random.Random) -> int:
    return rng.choice((0, 1, -7, 2**53 + 1, 2**63 - 1, -(2**63)))


KINDS: tuple[Kind, ...] = (
    (pa.float64(), _number),
    (pa.float32(), lambda rng: float(np.float32(_number(rng)))),
    (pa.float16(), lambda rng: np.float16(_number(rng) if rng.random() < 0.7 else rng.uniform(-2, 2))),
    (pa.int64(), _int),
    (pa.bool_(), lambda rng: rng.random() < 0.5),
    (pa.string(), _text),
    (pa.dictionary(pa.int8(), pa.string()), _text),
    (pa.binary(), lambda rng: rng.randbytes(3)),
    (pa.decimal128(20, 4), lambda rng: Decimal(rng.choice(("22", "1.5", "-0.0001", "1234567890123456.7891")))),
    (pa.date32(), lambda rng: date(2024, 2, rng.randint(1, 29))),
    (pa.timestamp("us"), lambda rng: datetime(2024, 2, 29, 1, rng.randint(0, 59))),
    (pa.timestamp("s", "UTC"), lambda rng: rng.choice((datetime(2024, 2, 29, tzinfo=UTC), 10**15))),
    (pa.duration("s"), lambda rng: timedelta(seconds=rng.randint(0, 10**6))),
    (pa.list_(pa.float32()), lambda rng: [float(np.float32(_number(rng))) for _ in range(rng.randint(0, 3))]),
    (pa.map_(pa.string(), pa.float32()), lambda rng: [("k", 0.5)]),
    (pa.null(), lambda rng: None),
)


def text_of(value: Any, kind: pa.DataType | None) -> str | None:
    """Expected text of a scalar, computed without the project's function; None if its row cannot be shown."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | np.floating) and math.isfinite(value):
        if value == int(value) and abs(value) < 1e15:
            return str(int(value))
        ours = {pa.float16(): np.float16, pa.float32(): np.float32}.get(kind, np.float64)
        mantissa, _, exponent = np.format_float_scientific(ours(value), trim="-").partition("e")
        if -7 < int(exponent) < 21:
            return np.format_float_positional(ours(value), trim="-")
        return f"{mantissa}e{int(exponent):+d}"
    if isinstance(value, Decimal):
        return format(value, "f").rstrip("0").rstrip(".") if "." in format(value, "f") else str(value)
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, date):
        return value.isoformat()
    return str(value) if isinstance(value, str | int) else None


def _parquet(path: Path, names: list[str], rng: random.Random, rows: int) -> tuple[list[list[Any]], pa.DataType]:
    kinds = [rng.choice(KINDS) for _ in names]
    columns = [[make(rng) if rng.random() < 0.9 else None for _ in range(rows)] for _, make in kinds]
    arrays = [_array(values, kind) for values, (kind, _) in zip(columns, kinds, strict=True)]
    pq.write_table(pa.table(arrays, names=names), path, row_group_size=rng.choice((1, 3, 100)))
    return [list(row) for row in zip(*columns, strict=True)], kinds[0][0]


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    if kind == pa.timestamp("s", "UTC"):  # a number of seconds may be after the last year
        plain = [int(value.timestamp()) if isinstance(value, datetime) else value for value in values]
        return pa.array(plain, pa.int64()).cast(kind)
    return pa.array(values, kind)


def _lines(path: Path, names: list[str], rng: random.Random, rows: int) -> tuple[list[list[Any]], None]:
    made = [[_json_value(rng) for _ in names] for _ in range(rows)]
    documents = [dict(zip(names, row, strict=True)) for row in made]
    text = json.dumps(documents) if path.suffix == ".json" else "\n".join(map(json.dumps, documents))
    path.write_text(text, errors="surrogatepass")
    return made, None


def _json_value(rng: random.Random) -> Any:
    value = rng.choice((_number, _int, _text, hostile_value))(rng)
    return None if value == "<deep>" else value


def _csv(path: Path, names: list[str], rng: random.Random, rows: int) -> tuple[list[list[Any]], None]:
    make = rng.choice((_text, lambda rng: repr(_number(rng)), lambda rng: str(_int(rng))))
    made = [[make(rng) for _ in names] for _ in range(rows)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *made])
    return made, None


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    os.environ["ARMATURE_CACHE"] = str(folder / "cache")
    files = 0

    def attempt(rng: random.Random) -> bool:
        nonlocal files
        files += 1
        names = rng.sample(NAMES, rng.randint(1, 3))
        suffix, write = rng.choice(((".parquet", _parquet), (".jsonl", _lines), (".json", _lines), (".csv", _csv)))
        path = folder / f"{files}{suffix}"
        rows, kind = write(path, names, rng, rng.randint(4, 12))
        damaged = rng.random() < 0.2
        if damaged:
            path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        args = {
            "source": str(path),
            "prompt": "".join(f"{{{json.dumps(name)}}}" for name in names[:1]) + "?",
            "answer": rng.choice((names[0], normalize("NFD", names[0]))),
            "kind": rng.choice(("", names[-1])),
            "split": {"by": "hash", "heldout": 0.5},
            "on_bad_row": "skip",
            "reserved_tokens": [RESERVED],
            "rewards": [{"name": "exact_match", "ignore_punctuation": False}],
        }
        try:
            settings = EnvironmentSettings.model_validate({"name": "dataset", "args": args})
            environment: Any = make_environment(settings, processes=1)
            with closing(environment):
                tasks = [*environment.tasks("train"), *environment.tasks("heldout")]
                played = [(task.payload["row"], asyncio.run(_play(environment, task))) for task in tasks]
                drops = dict(environment.drops)
        finally:
            path.unlink()
        if damaged:
            return True
        expect(len(tasks) + sum(drops.values()) == len(rows), f"{len(rows)} rows: {len(tasks)} tasks, {drops}")
        for index, (shown, reward) in played:
            value = rows[index][0]
            if suffix == ".csv":
                expect(shown == value or float(shown) == float(value), f"{value!r} is shown as {shown!r}")
            elif not isinstance(value, list | tuple):
                expect(shown == text_of(value, kind), f"{value!r} of {kind} is shown as {shown!r}")
                expect(reward == 1.0, f"the answer {value!r} of {kind} is graded {reward} for {shown!r}")
            expect(RESERVED not in shown, "a reserved token is shown")
        return True

    yield attempt


async def _play(environment: Any, task: Any) -> tuple[str, float]:
    episode = environment.episode(task)
    (shown,) = (await episode.reset()).content
    outcome = await episode.step(shown[:-1])
    return shown[:-1], outcome.reward_parts["exact_match"]
