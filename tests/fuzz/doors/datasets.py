"""Robot datasets in LeRobot's layout."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from armature.components.artifacts.cache import DownloadCache
from armature.components.robots.datasets.lerobot.frames import FrameReader
from armature.components.robots.datasets.lerobot.reader import Dataset, open_dataset
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, damaged_document, dumps, hostile_value
from tests.robots.datasets.conftest import write

NUMBERS = ("observation.state", "action", "next.reward", "task_index")


def damage_cell(path: Path, rng: random.Random) -> None:
    """Replace the value of a random cell of a Parquet file. If Arrow cannot write the new column, damage the bytes of
    the file instead."""
    table = pq.read_table(path)
    name = rng.choice(table.column_names)
    values = table[name].to_pylist()
    row = rng.randrange(len(values))
    if isinstance(values[row], list) and rng.random() < 0.5:
        values[row] = values[row][: rng.randrange(len(values[row]) + 1)]
    elif isinstance(values[row], list) and values[row]:
        values[row][rng.randrange(len(values[row]))] = hostile_value(rng)
    else:
        values[row] = hostile_value(rng)
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, UnicodeError):
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        return
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)


def compare(dataset: Dataset, root: Path) -> None:
    """Check that all numbers of the dataset equal the ones that pandas reads from its files."""
    read = [dataset.columns(NUMBERS, episode) for episode in dataset.episodes]
    parts = [pd.read_parquet(path, columns=list(NUMBERS)) for path in sorted(root.glob("data/*/*.parquet"))]
    rows = pd.concat(parts, ignore_index=True)
    for episode, columns in zip(dataset.episodes, read, strict=True):
        for name in NUMBERS:
            expected = np.stack([np.ravel(cell) for cell in rows[name][episode.start : episode.stop]])
            expect(np.array_equal(columns[name], expected, equal_nan=True), f"{name} has other values")


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    os.environ["ARMATURE_CACHE"] = str(folder / "cache")
    whole = folder / "whole"
    write(whole)

    def attempt(rng: random.Random) -> bool:
        root = folder / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(folder / "cache", ignore_errors=True)
        shutil.copytree(whole, root)
        path = rng.choice(sorted(path for path in root.rglob("*") if path.is_file()))
        if path.suffix == ".json" and rng.random() < 0.7:
            path.write_bytes(dumps(damaged_document(json.loads(path.read_bytes()), rng)))
        elif path.suffix == ".parquet" and rng.random() < 0.7:
            damage_cell(path, rng)
        else:
            path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        dataset = open_dataset(root)
        compare(dataset, root)
        frames = FrameReader(dataset, DownloadCache.standard())
        for index in (0, 7, 8, dataset.info.total_frames - 1):
            frames.item(index, {"action": [0.0]})
        return True

    yield attempt
