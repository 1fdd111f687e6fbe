"""A table of bar charts, written in every format that the environment `dataset` reads."""

from __future__ import annotations

import base64
import csv
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from armature.components.contracts.episodes import Environment, Task
from armature.components.environments.dataset.environment import DatasetEnvironment
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings

ANSWERS = ("left", "middle", "right")
REWARDS = [{"name": "exact_match"}]
Row = dict[str, Any]


def bars(number: int) -> bytes:
    """A PNG of three bars of which bar `number % 3` is the highest; each number gives another image."""
    image = Image.new("RGB", (48, 48), "white")
    draw = ImageDraw.Draw(image)
    for bar in range(3):
        height = 40 if bar == number % 3 else 8 + (number * 7 + bar * 5) % 20
        draw.rectangle((4 + 15 * bar, 48 - height, 12 + 15 * bar, 47), (number % 256, 40 * bar, 200 - number % 200))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def rows_of(count: int) -> list[Row]:
    return [
        {
            "id": number,
            "question": f'Which bar of chart {number} is the highest, "{{left}}" or another?',
            "image": f"images/{number:03d}.png",
            "answer": ANSWERS[number % 3],
            "kind": f"kind {number % 2}",
            "split": "train" if number % 4 else "test",
        }
        for number in range(count)
    ]


def write_images(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for row in rows:
        (folder / row["image"]).write_bytes(bars(row["id"]))


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _jsonl(folder: Path, rows: list[Row]) -> Row:
    write_jsonl(folder / "rows.jsonl", rows)
    return {"source": str(folder / "rows.jsonl")}


def _json(folder: Path, rows: list[Row]) -> Row:
    (folder / "rows.json").write_text(json.dumps(rows, indent=2))
    return {"source": str(folder / "rows.json")}


def _csv(folder: Path, rows: list[Row]) -> Row:
    write_csv(folder / "rows.csv", rows)
    return {"source": str(folder / "rows.csv")}


def _parquet(folder: Path, rows: list[Row]) -> Row:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=7)
    return {"source": str(folder / "rows.parquet")}


def _shards(folder: Path, rows: list[Row]) -> Row:
    for number in range(3):
        write_jsonl(folder / f"tables/part-{number}.jsonl", rows[number::3])
    return {"source": str(folder / "tables/part-*.jsonl"), "root": str(folder)}


def _folder_of_shards(folder: Path, rows: list[Row]) -> Row:
    _shards(folder, rows)
    return {"source": str(folder / "tables"), "root": str(folder)}


def _embedded(folder: Path, rows: list[Row]) -> Row:
    """Write Parquet with images as {bytes, path}, the way Hugging Face writes a column of images."""
    full = [{**row, "image": {"bytes": bars(row["id"]), "path": row["image"]}} for row in rows]
    pq.write_table(pa.Table.from_pylist(full), folder / "embedded.parquet", row_group_size=7)
    shutil.rmtree(folder / "images")
    return {"source": str(folder / "embedded.parquet")}


def _metadata(folder: Path, rows: list[Row]) -> Row:
    write_jsonl(folder / "metadata.jsonl", [{**row, "file_name": row["image"]} for row in rows])
    return {"source": str(folder)}


def _saved(folder: Path, rows: list[Row]) -> Row:
    import datasets

    features = datasets.Features(
        {name: datasets.Image() if name == "image" else datasets.Value("string") for name in rows[0]}
        | {"id": datasets.Value("int64")}
    )
    full = [{**row, "image": {"bytes": bars(row["id"]), "path": row["image"]}} for row in rows]
    datasets.Dataset.from_list(full, features=features).save_to_disk(str(folder / "saved"))
    shutil.rmtree(folder / "images")
    return {"source": str(folder / "saved")}


def _memory(folder: Path, rows: list[Row]) -> Row:
    import fsspec

    write_jsonl(folder / "rows.jsonl", rows)
    fsspec.filesystem("memory").put(str(folder), f"/{folder.name}", recursive=True)
    shutil.rmtree(folder)
    return {"source": f"memory://{folder.name}/rows.jsonl"}


FORMS: dict[str, Callable[[Path, list[Row]], Row]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
    "glob of shards": _shards,
    "folder of shards": _folder_of_shards,
    "parquet with images": _embedded,
    "folder of images with metadata": _metadata,
    "saved by datasets": _saved,
    "URL": _memory,
}


def args_of(where: Row, **changes: Any) -> Row:
    return {
        **where,
        "prompt": "{image}{question}",
        "images": ["image"],
        "answer": "answer",
        "kind": "kind",
        "rewards": REWARDS,
        **changes,
    }


def environment_of(where: Row, **changes: Any) -> DatasetEnvironment:
    """Make the environment; `train_tasks`, `heldout_tasks` and `seed` go to its settings, all else to its arguments."""
    values = {key: changes.pop(key) for key in ("train_tasks", "heldout_tasks", "seed") if key in changes}
    environment = make_environment(EnvironmentSettings(name="dataset", args=args_of(where, **changes), **values))
    assert isinstance(environment, DatasetEnvironment)
    return environment


def tasks_of(environment: Environment) -> list[Task]:
    """The tasks of both splits."""
    return [*environment.tasks("train"), *environment.tasks("heldout")]


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
