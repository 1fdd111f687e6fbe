"""Limits that stop reading or copying early, because a small file may decode to a huge one."""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from armature.components.artifacts import tables
from armature.components.artifacts.tensors import read_tensors
from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ArmatureError, ConfigurationError, DataError
from armature.components.contracts.files import read_bytes
from armature.components.environments.dataset import shards
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.inference.command import read_config
from armature.components.rewards.make import make_rewards
from armature.components.rewards.reward import RewardSettings
from armature.components.robots.datasets.lerobot.layout import read_info
from armature.components.robots.policies.norm_stats import NormStats
from armature.components.robots.policies.source import read_json

from .test_values import environment_of

MIB = 2**20
SMALL = 2**16
"""Bytes used in place of 1 MiB: these tests divide all limits by 16 to be quick."""
VALUE = "x" * SMALL


def _dictionary(value: Any, rows: int = 260) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))


def _random(size: int) -> bytes:
    return np.random.default_rng(0).bytes(size)


BOMBS: dict[str, Callable[[], pa.Array]] = {
    "text": lambda: _dictionary(VALUE),
    "random bytes": lambda: _dictionary(_random(SMALL)),
    "one large value": lambda: _dictionary("x" * (96 * SMALL), 3),
    "images": lambda: pa.StructArray.from_arrays([_dictionary(VALUE.encode()).dictionary_decode()], ["bytes"]),
    "distinct texts": lambda: pa.array([f"{number}{VALUE}" for number in range(260)]),
    "rows of nothing": lambda: pa.nulls(MIB * 13),
    "lists of numbers": lambda: pa.ListArray.from_arrays(np.array([0, 40 * SMALL], np.int32), np.zeros(40 * SMALL)),
}


def _scan(path: Path, answers: Any) -> None:
    """Read all rows with a limit of 16 MiB per file, and send the outcome and the added memory in MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * MIB, 16 * MIB))
    try:
        outcome = str(sum(1 for _ in shards.open_parquet(path, path.name).scan({"q"})))
    except DataError as error:
        outcome = error.code
    answers.put((outcome, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024))


@pytest.fixture(scope="module")
def bombs() -> Any:
    """Folder of files that decode to far more bytes, written by another process to keep our memory small."""
    with tempfile.TemporaryDirectory() as folder:
        child = multiprocessing.get_context("fork").Process(target=_write_bombs, args=(Path(folder),))
        child.start()
        child.join()
        yield Path(folder)


def _write_bombs(folder: Path) -> None:
    for name, make in BOMBS.items():
        pq.write_table(pa.table({"q": make()}), folder / f"{name}.parquet", compression="zstd", store_schema=False)


@pytest.mark.parametrize("kind", BOMBS)
def test_rejects_parquet_bombs_before_writing_a_copy(kind: str, bombs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MIN_LIMIT_BYTES", tables.MIN_LIMIT_BYTES // 16)
    monkeypatch.setattr(tables, "BATCH_BYTES", tables.BATCH_BYTES // 16)
    path = bombs / f"{kind}.parquet"
    assert path.stat().st_size < MIB
    outcome, grown = _in_child(_scan, path)
    assert outcome == "table_too_large" and grown < 128, (outcome, grown)


def test_accepts_large_text_shared_by_all_rows(tmp_path: Path) -> None:
    table = {"q": [f"question {number}" for number in range(20_000)], "s": _dictionary("y" * 4096, 20_000)}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    shard = shards.open_parquet(tmp_path / "rows.parquet", "rows.parquet")
    assert sum(len(row["s"]) == 4096 for row in shard.scan(shard.columns) if isinstance(row, dict)) == 20_000


@pytest.mark.parametrize("end", [b"\n", b""])
def test_too_long_line_makes_a_bad_row(end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LONGEST_LINE", 100)
    long = [b'{"q": "' + b"x" * count + b'"}' for count in (5000, 92)]
    lines = [b'{"q": 1}', long[0], b"", b'{"q": 2}', long[1], b"z" * 999]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines) + end)
    shard = shards.JsonLinesRows(tmp_path / "rows.jsonl", "rows.jsonl")
    expected = [{"q": 1}, "too_long", {"q": 2}, "too_long", "too_long"]
    assert [row if isinstance(row, dict) else row.reason for row in shard.scan({"q"})] == expected
    assert shard.row(0) == {"q": 1} and shard.row(2) == {"q": 2}
    for index in (1, 3, 4):
        with pytest.raises(BadRow):
            shard.row(index)


def _in_child(work: Callable[..., None], path: Path) -> Any:
    """Run `work` in a new process with its own limits and memory, and return its answer."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=work, args=(path, answers))
    child.start()
    child.join(60)
    return answers.get()


def _scan_endless(path: Path, answers: Any) -> None:
    """Scan a line of 256 MiB in 64 MiB of memory."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 64 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        (row,) = shards.JsonLinesRows(path, path.name).scan({"q"})
        answers.put(row.reason if isinstance(row, BadRow) else "accepted")
    except MemoryError:
        answers.put("memory")


def test_endless_line_is_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LONGEST_LINE", MIB)
    assert _in_child(_scan_endless, _sparse(tmp_path / "rows.jsonl", 2**28)) == "too_long"


SPACE = st.text(" \t\n\r", max_size=2)
JSON = st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))


@given(st.lists(JSON, max_size=4), SPACE, SPACE, st.integers(0, 40), st.sampled_from(["", ",", "]", "[", "x", " "]))
@example([1], "", "", 2, ",")
@example([], "", "", 1, ",")
def test_json_list_items_equal_python_json(rows: list[Any], before: str, after: str, place: int, edit: str) -> None:
    text = before + json.dumps(rows).replace(",", f"{before},{after}") + after
    text = text[:place] + edit + text[place:]
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    if isinstance(expected, list):
        assert list(map(json.loads, shards._list_items(text))) == expected
    else:
        with pytest.raises(ValueError):
            list(shards._list_items(text))


@pytest.mark.parametrize(
    ("name", "limit", "content"),
    [
        ("rows.json", "LARGEST_JSON", json.dumps([{"q": "x" * 999, "a": "a"}] * 99)),
        ("rows.csv", "LARGEST_CSV", "q,a\n" + f"{'x' * 999},a\n" * 99),
        ("rows.csv", "LONGEST_HEADER", f"{'q' * 3000},a\nx,y\n"),
    ],
)
def test_rejects_tables_above_their_size_limit(
    name: str, limit: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(content)
    monkeypatch.setattr(shards, limit, 2000)
    with pytest.raises((DataError, ConfigurationError)):
        list(environment_of(tmp_path, name, prompt="{q}").tasks("train"))


def _sparse(path: Path, size: int = 2**40) -> Path:
    """Write a sparse file, which has more bytes than any memory and takes no disk space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def _schema(folder: Path) -> None:
    _sparse(folder / "schema.json")
    settings = RewardSettings.model_validate({"name": "json_schema", "file": "schema.json"})
    make_rewards([settings], folder=folder).close()


DOCUMENTS: dict[str, Callable[[Path], Any]] = {
    "any": lambda folder: read_bytes(_sparse(folder / "x")),
    "recipe": lambda folder: load_recipe(_sparse(folder / "x.toml")),
    "LeRobot's info": lambda folder: read_info(_sparse(folder / "info.json")),
    "normalization statistics": lambda folder: NormStats.load(_sparse(folder / "norm_stats.json")),
    "configuration of a checkpoint": lambda folder: read_config(_sparse(folder / "config.json").parent),
    "index of weights": lambda folder: read_tensors(_sparse(folder / "model.safetensors.index.json").parent),
    "LeRobot's policy": lambda folder: read_json(_sparse(folder / "config.json")),
    "JSON schema": _schema,
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_reads_stop_at_their_size_limit(document: str, tmp_path: Path) -> None:
    with pytest.raises(ArmatureError):
        DOCUMENTS[document](tmp_path)
