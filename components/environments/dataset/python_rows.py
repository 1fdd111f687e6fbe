"""Write the rows that a Python program passes, such as a `datasets.Dataset` or a data frame, as a table on disk.

A training copies its rows, so that it reads them like any other table, and a resumed training finds equal rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from PIL import Image

from armature.components.artifacts.images import encode_png
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.files import DataFiles, FolderFiles
from armature.components.environments.dataset.huggingface import label_reader, split_rows
from armature.components.environments.dataset.images import TableImage, table_images
from armature.components.environments.dataset.settings import DatasetEnvironmentSettings
from armature.components.environments.dataset.shards import ArrowRows, Row
from armature.components.environments.dataset.source import is_hub_name, open_table
from armature.components.environments.dataset.values import plain_value
from armature.components.machine.hub import commit_of

IMAGE_COLUMNS = ("image", "images")
"""Names of columns with an image or a list of images, as in TRL."""
PROMPT = "prompt"
"""Name of the column with the prompt, a text or a list of messages, as in TRL."""
SPLIT_NAMES = {"train": ("train",), "heldout": ("test", "validation")}
"""Names of the splits of a dataset that are used for training and as held out."""


@dataclass(frozen=True)
class WrittenRows:
    """The description of a table that `write_rows` has written."""

    count: int
    columns: tuple[str, ...]
    """Names of all columns, sorted."""
    chat: bool
    """True if the column `prompt` holds lists of messages."""
    most_images: int
    """Largest number of images in a row."""


def write_rows(rows: Any, folder: Path, split: str, most: int | None = None) -> WrittenRows:
    """Write rows as the table `<split>.jsonl`, and their images as files in the folder `images` beside it.

    Args:
        rows: a `datasets.Dataset` or `IterableDataset`, a pandas data frame, an Arrow table, any iterable of dicts, or
            the source of the environment `dataset` as a text: a file, a folder, or a name on the hub. Images may be
            PIL images, arrays (H, W, 3) uint8, bytes, or paths.
        split: "train" or "heldout". Of a source with several splits it selects those in `SPLIT_NAMES`.
        most: number of rows after which the rest is ignored; None: all rows.

    Raises:
        ConfigurationError: `rows` has another type, or a source's splits have other names.
        DataError: a source cannot be read, or a value has no form in JSON.
    """
    count, most_images, chat, columns = 0, 0, False, set[str]()
    (folder / "images").mkdir(parents=True, exist_ok=True)
    target = folder / f"{split}.jsonl"
    with (part := target.with_suffix(".part")).open("w") as file:
        for number, (row, files) in enumerate(islice(_rows(rows, split), most)):
            if isinstance(row, BadRow):  # is unreadable here too, so that it is counted with all other bad rows
                file.write("null\n")
                continue
            if not isinstance(row, Mapping):
                raise _wrong_type(row, "a row")
            values = {str(name): _value(value, str(name), folder, files) for name, value in row.items()}
            try:
                file.write(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"a value has no form in JSON: {error}",
                    code="value_not_json",
                    where=f"row {number} of the {split} rows, columns {', '.join(values)}",
                    remedy="remove the column, or turn its values into text or numbers",
                ) from error
            count += 1
            columns |= values.keys()
            chat |= isinstance(values.get(PROMPT), list)
            images = [values[name] for name in IMAGE_COLUMNS if values.get(name) is not None]
            most_images = max(most_images, sum(len(each) if isinstance(each, list) else 1 for each in images))
            if isinstance(messages := values.get(PROMPT), list):
                parts = [part for each in messages if isinstance(each, dict) for part in each.get("content") or ()]
                inside = sum(isinstance(part, dict) and part.get("type") == "image" for part in parts)
                most_images = max(most_images, inside)
    part.replace(target)
    return WrittenRows(count, tuple(sorted(columns)), chat, most_images)


def _rows(rows: Any, split: str) -> Iterator[tuple[Any, DataFiles | None]]:
    """Yield each row, and the files that paths in it refer to; None: the files of this machine."""
    if isinstance(rows, str | Path):
        yield from _source_rows(str(rows), split)
        return
    library = sys.modules.get("datasets")
    if isinstance(rows, pd.DataFrame):
        rows = pa.Table.from_pandas(rows, preserve_index=False) if _is_plain(rows) else rows.to_dict("records")
    if isinstance(rows, pa.Table):
        table = rows
        shard = ArrowRows("rows", len(table), table.column_names, lambda start, stop: table.slice(start, stop - start))
        rows = shard.scan(shard.columns)
    elif library is not None and isinstance(rows, library.Dataset):
        shard = split_rows("rows", rows)
        rows = shard.scan(shard.columns)
    elif library is not None and isinstance(rows, library.IterableDataset):
        named = {key: reader for key, each in (rows.features or {}).items() if (reader := label_reader(each))}
        rows = ({**row, **{key: reader(row[key]) for key, reader in named.items()}} for row in rows)
    elif isinstance(rows, Mapping | bytes) or not isinstance(rows, Iterable):
        raise _wrong_type(rows, "a dataset")
    for row in rows:
        yield row, None


def _source_rows(source: str, split: str) -> Iterator[tuple[Row | BadRow, DataFiles]]:
    """Yield the rows of a file, a folder or a dataset of the hub, of which the newest commit is used."""
    settings = DatasetEnvironmentSettings(source=source, prompt="unused", rewards=({"name": "exact_match"},))
    if is_hub_name(settings):
        settings = settings.model_copy(update={"revision": commit_of(source, "main", "dataset", print)})
    table = open_table(settings)
    names = list(table.shards)
    if table.has_splits and len(names) > 1:
        names = [name for name in names if name in SPLIT_NAMES[split]]
        if len(names) != 1:
            raise ConfigurationError(
                f"the dataset has the splits {', '.join(table.shards)}",
                code="split_not_chosen",
                where=source,
                remedy="load one: datasets.load_dataset(name, split=...)",
            )
    for name in names:
        shard = table.shards[name]
        for row in shard.scan(shard.columns):
            yield row, table.files


def _wrong_type(value: Any, role: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(value).__name__} is not {role}",
        code="rows_wrong_type",
        where="train_dataset, eval_dataset",
        remedy="pass one split of a datasets.Dataset, a data frame, an Arrow table, dicts of columns, a path or a name "
        "on the hub",
    )


def _is_plain(frame: pd.DataFrame) -> bool:
    """Return True if Arrow can hold the data frame; it cannot hold PIL images and mixed columns."""
    try:
        pa.Schema.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError):
        return False
    return True


def _value(value: Any, column: str, folder: Path, files: DataFiles | None) -> Any:
    """Return a value for JSON, with images replaced by the names of their files below `folder`."""
    nested = partial(_value, column=column, folder=folder, files=files)
    if isinstance(value, Image.Image):
        return _stored(encode_png(value).data, folder)
    if column in IMAGE_COLUMNS and (data := _image_bytes(value, files)) is not None:
        return _stored(data, folder)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        # Datasets fill the fields that a message does not have with null.
        return {str(key): nested(each) for key, each in value.items() if each is not None or column != PROMPT}
    if isinstance(value, list | tuple):
        return [nested(each) for each in value]
    return None if value is pd.NA or value is pd.NaT or isinstance(value, bytes) else plain_value(value)


def _image_bytes(value: Any, files: DataFiles | None) -> bytes | None:
    """Return the bytes of an image, or None for a list of images and for values that are not the bytes of one.

    A path of a file that does not exist stays in the row, where it is found and counted with other bad rows.
    """
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3:
        return encode_png(Image.fromarray(value)).data
    if value is None or isinstance(value, list | tuple | np.ndarray):
        return None
    try:
        (image,) = table_images(value, IMAGE_COLUMNS[0])
        if image.data is not None:
            return image.data
        if files is None:
            path = Path(image.path or "").absolute()
            image, files = TableImage(path.name, None), FolderFiles(path.parent, links=True)
        return image.load(files).data
    except (BadRow, DataError, ValueError):
        return None


def _stored(data: bytes, folder: Path) -> str:
    """Write the bytes of an image to the folder, unless they are there, and return the file's name below it."""
    name = f"images/{sha256(data).hexdigest()[:32]}"
    if not (folder / name).exists():
        (folder / f"{name}.part").write_bytes(data)
        (folder / f"{name}.part").replace(folder / name)
    return name
