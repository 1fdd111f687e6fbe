"""Malformed tables: an error with a code before the start, or a row that is counted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from armature.components.artifacts.images import MAX_BYTES
from armature.components.contracts.errors import ConfigurationError, DataError, RolloutFailed
from armature.components.environments.dataset.bad_rows import BadRow
from tests.images import raw_png
from tests.refusals import refused

from .tables import args_of, bars, environment_of, rows_of, tasks_of, write_images, write_jsonl

REASONS = {line.split()[0] for line in str(BadRow.__doc__).splitlines()[2:] if line.strip()}


SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=8)),
    st.sampled_from(["", " ", "\ud800", "\0", "x" * 10**5, "images/000.png", "../out.png", "/etc/passwd", "images"]),
    st.sampled_from(["https://example.org/a.png", "data:image/png;base64,!!", "iVBORw0KGgo", "[", "[]", "~/a.png"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("question", "image", "answer", "kind", "split", "id", "chat"), VALUES)
    ),
    min_size=1,
    max_size=4,
)


def outcome(where: dict[str, Any], **changes: Any) -> int:
    """Return the number of playable tasks, after checking that all else is an expected error or a counted row."""
    try:
        environment = environment_of(where, **{"on_bad_row": "skip", **changes})
        tasks = tasks_of(environment)
    except (ConfigurationError, DataError) as error:
        assert len(str(error)) < 20_000
        return 0
    assert set(environment.drops) <= REASONS, environment.drops
    for task in tasks:
        json.dumps(task.payload, allow_nan=False)
        try:
            asyncio.run(environment.episode(task).reset())
            asyncio.run(environment.episode(task).step("x"))
        except RolloutFailed as failed:
            assert failed.reason in ("bad_image", "bad_answer")
    return len(tasks)


GOOD = rows_of(4)


@settings(max_examples=60, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(rows=ROWS, chat=st.booleans(), column=st.booleans())
def test_rows_of_arbitrary_values_are_played_or_counted(rows: list[dict[str, Any]], chat: bool, column: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, GOOD)
        lines = [json.dumps(row) for row in [*rows, *GOOD]]
        (folder / "rows.jsonl").write_text("\n".join(lines))
        how = {"prompt": "", "conversation": "chat"} if chat else {"prompt": "{image}{question}"}
        split = {"by": "column", "heldout": ["test"]} if column else {"by": "hash", "heldout": 0.5}
        playable = outcome({"source": str(folder / "rows.jsonl")}, split=split, **how)
        assert playable <= len(lines) and (chat or not column or playable >= 4)


def bomb() -> bytes:
    """A PNG of 60,000 x 60,000 pixels in a few bytes."""
    small = raw_png(8, 8, 8, 0, b"\0" * 64).data
    head = struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return small[:16] + head + crc + small[16 + len(head) + 4 :]


BAD_IMAGES: dict[str, list[Any]] = {
    "bad_path": [
        *("../secret.png", "images/../../secret.png", "/etc/hostname", "C:\\secret.png", "..\\secret.png"),
        *("link.png", "linked/secret.png", "images/a\0b.png", "x" * 5000),
        *("https://example.org/1.png", "file:///etc/hostname", {"bytes": None, "path": "../secret.png"}),
    ],
    "no_image": ["x" * 300, "images", "images/absent.png", "pipe.png", "", None, {"bytes": None, "path": None}, [None]],
    "wrong_type": [7, {"bytes": 7, "path": None}, "[1"],
    "bad_image": [
        *("bomb.png", "text.png", "empty.png", "cut.png", "large.png"),
        *("data:image/png;base64,AAAA", "data:image/png;base64,%%%"),
    ],
}


@pytest.mark.parametrize(("image", "reason"), [(each, reason) for reason, bad in BAD_IMAGES.items() for each in bad])
def test_unusable_image_makes_a_bad_row(image: Any, reason: str, tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_images(root, GOOD)
    (tmp_path / "secret.png").write_bytes(bars(1))
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "linked").symlink_to(tmp_path)
    (root / "bomb.png").write_bytes(bomb())
    (root / "text.png").write_text("not an image")
    (root / "empty.png").touch()
    (root / "cut.png").write_bytes(bars(1)[:30])
    (root / "large.png").write_bytes(bars(1))
    os.truncate(root / "large.png", MAX_BYTES + 1)
    os.mkfifo(root / "pipe.png")
    rows = [*GOOD, {**GOOD[1], "image": image}]
    write_jsonl(root / "rows.jsonl", rows)
    where = {"source": str(root / "rows.jsonl"), "split": {"by": "column"}}
    with refused("rows_unusable", "1 of 5", f"1 {reason}", "rows.jsonl, row 4", 'on_bad_row = "skip"'):
        list(environment_of(where).tasks("train"))
    environment = environment_of(where, on_bad_row="skip")
    assert sorted(task.payload["row"] for task in tasks_of(environment)) == [0, 1, 2, 3]
    assert environment.drops == {reason: 1}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_unchecked_damaged_image_fails_only_its_rollout(form: str, tmp_path: Path) -> None:
    rows = rows_of(20)
    write_images(tmp_path, rows)
    (tmp_path / rows[3]["image"]).write_bytes(b"not an image")
    full = [{**row, "image": {"bytes": (tmp_path / row["image"]).read_bytes(), "path": None}} for row in rows]
    pq.write_table(pa.Table.from_pylist(full), tmp_path / "rows.parquet")
    write_jsonl(tmp_path / "rows.jsonl", rows)
    environment = environment_of({"source": str(tmp_path / f"rows.{form}")}, split={"by": "column"}, check_images=False)
    tasks = {task.payload["row"]: task for task in tasks_of(environment)}
    assert len(tasks) == 20 and environment.drops == {}
    with refused("bad_image", "image"):
        asyncio.run(environment.episode(tasks.pop(3)).reset())
    for task in tasks.values():
        asyncio.run(environment.episode(task).reset())


UNREADABLE_LINES = [
    *(b"\xff\xfe\0\0", b"{" * 100000, b'{"question": ' + b"9" * 5000 + b"}"),
    *(b'{"question": "a", "question": "b"}', b'{"a": {"b": 1, "b": 2}}'),
]
UNREADABLE_LISTS = [b'[{"a": 1, "a": 2}]', b'[{"a": ' + b"9" * 5000 + b"}]", b'{"a": [']
NO_CSV = [b"question,image,answer,kind\na,b\n", b"question,image,answer,kind\n\xe9,b,c,d\n"]


@pytest.mark.parametrize(
    ("source", "files", "code", "value"),
    [
        *(("rows.jsonl", {"rows.jsonl": data}, "rows_unusable", "1 unreadable") for data in UNREADABLE_LINES),
        *(("rows.json", {"rows.json": data}, "rows_unusable", "1 unreadable") for data in UNREADABLE_LISTS),
        *(("rows.csv", {"rows.csv": data}, "table_unreadable", "CSV") for data in NO_CSV),
        *(("rows.json", {"rows.json": data}, "table_unreadable", "JSON") for data in (b"[1, 2", b"3")),
        ("rows.jsonl", {"rows.jsonl": b'"text"\n[1]\n3\n'}, "rows_unusable", "3 unreadable"),
        ("rows.json", {"rows.json": b"[1, 2]"}, "rows_unusable", "2 unreadable"),
        ("rows.jsonl", {"rows.jsonl": b'\xef\xbb\xbf{"question": "a"}'}, "unknown_column", "'image'"),
        ("rows.jsonl", {"rows.jsonl": b""}, "split_empty", "'train'"),
        ("rows.csv", {"rows.csv": b"question,question\na,b\n"}, "column_repeated", "rows.csv"),
        ("rows.csv", {"rows.csv": b""}, "column_repeated", "rows.csv"),
        ("rows.parquet", {"rows.parquet": b"PAR1"}, "table_unreadable", "Parquet"),
        ("", {"notes.txt": b"hello"}, "format_unknown", "JSONL"),
        ("rows.jsonl", {"rows.jsonl/notes.txt": b"hello"}, "format_unknown", "rows.jsonl"),
        ("", {"a.jsonl": b"{}", "b.csv": b"a"}, "format_unknown", "csv, jsonl"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rejects_sources_without_a_valid_table(
    source: str, files: dict[str, bytes], code: str, value: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with refused(code, value):
        list(environment_of({"source": str(tmp_path / source)}).tasks("train"))


@pytest.mark.parametrize("depth", [480, 700, 950])
@pytest.mark.parametrize("column", ["question", "answer", "kind", "image", "unused"])
def test_deeply_nested_value_makes_a_bad_row(column: str, depth: int, tmp_path: Path) -> None:
    """The module json parses up to Python's recursion limit; functions that walk through the value recurse deeper."""
    write_images(tmp_path, GOOD)
    nested = json.dumps({**GOOD[1], column: "VALUE"}).replace('"VALUE"', "[" * depth + "]" * depth)
    (tmp_path / "rows.jsonl").write_text("\n".join([*map(json.dumps, GOOD), nested]))
    where = {"source": str(tmp_path / "rows.jsonl"), "split": {"by": "column"}}
    assert outcome(where) == 4
    with refused("rows_unusable", "1 of 5", "1 unreadable"):
        list(environment_of(where).tasks("train"))


def test_reads_file_names_that_are_not_utf8(tmp_path: Path) -> None:
    for number in range(8):
        path = tmp_path / "ab"[number % 2] / os.fsdecode(b"\xfe%d.png" % number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bars(number))
    where = {"source": str(tmp_path), "split": {"by": "hash", "heldout": 0.5, "group": "image"}}
    environment = environment_of(where, prompt="{image}Which?", answer="label", kind="")
    assert len(tasks_of(environment)) == 8
    before = environment.sources(environment.settings)
    path.write_bytes(bars(9))
    assert environment.sources(environment.settings)["images"] != before["images"]


def test_missing_datasets_library_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from armature.components.environments.dataset import huggingface

    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    with refused("package_missing", "datasets", "armature-vla[huggingface]"):
        environment_of(args_of({"source": "owner/name", "revision": "0" * 40}))


def test_one_error_names_rows_of_every_reason_in_order(tmp_path: Path) -> None:
    """Images of files are checked after all else, and all the same they are in the same error; at most ten a reason."""
    rows = rows_of(40)
    write_images(tmp_path, rows)
    for number in range(12, 36, 2):  # twelve rows
        (tmp_path / rows[number]["image"]).unlink()
    (tmp_path / rows[3]["image"]).write_text("not an image")
    rows[5]["question"], rows[7]["answer"], rows[9]["image"] = None, "", 7
    write_jsonl(tmp_path / "rows.jsonl", rows)
    with refused("rows_unusable", "16 of 40", "12 no_image") as caught:
        list(
            environment_of({"source": str(tmp_path / "rows.jsonl")}, split={"by": "hash", "heldout": 0.5}).tasks(
                "train"
            )
        )
    named = re.findall(r"rows.jsonl, row (\d+): (\w+): ", str(caught.value))
    assert sorted(named[10:], key=lambda each: int(each[0])) == [
        *(("3", "bad_image"), ("5", "no_text"), ("7", "no_answer"), ("9", "wrong_type")),
    ]
    assert len(named) == 14 and {reason for _, reason in named[:10]} == {"no_image"}
    missing = [int(number) for number, _ in named[:10]]
    assert missing == sorted(set(missing)) and set(missing) <= set(range(12, 36, 2))
