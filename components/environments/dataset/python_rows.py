"""Write the rows that a Python program passes, such as a `datasets.Dataset` or a data frame, as a table on disk.

A training copies its rows, so that it reads them like any other table, and a resumed training finds equal rows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from PIL import Image

from armature.components.artifacts.images import encode_png
from armature.components.contracts.errors import ConfigurationError, DataError, said
from armature.components.environments.dataset.bad_rows import BadRow, BadRows
from armature.components.environments.dataset.files import DataFiles, FolderFiles
from armature.components.environments.dataset.huggingface import label_reader, split_rows
from armature.components.environments.dataset.images import TableImage, table_images
from armature.components.environments.dataset.settings import TableSettings
from armature.components.environments.dataset.shards import ArrowRows, Row
from armature.components.environments.dataset.source import is_hub_name, open_table, refuse_missing_source
from armature.components.environments.dataset.values import plain_value
from armature.components.machine.hub import commit_of

IMAGE_COLUMNS = ("image", "images")
"""Names of columns with an image or a list of images, as in TRL."""
PROMPT = "prompt"
"""Name of the column with the prompt, a text or a list of messages, as in TRL."""
MESSAGES = (PROMPT, "messages", "chosen", "rejected")
"""Names of columns with lists of messages, as in TRL."""
MESSAGE_IMAGES = ("image", "image_url", "url", "path")
"""Keys of a message's part that may hold an image."""
SPLIT_NAMES = {"train": ("train",), "heldout": ("test", "validation")}
"""Names of the splits of a dataset that are used for training and as held out."""
ARGUMENTS = {"train": "train_dataset", "heldout": "eval_dataset"}
"""Names of the trainer's arguments with the rows of each split."""


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
    other_images: tuple[str, ...]
    """Names of columns that hold images and are not in `IMAGE_COLUMNS`, sorted."""


def describe_rows(rows: Any, split: str) -> WrittenRows | None:
    """Return what is known of rows before they are written, without writing or fetching anything.

    It is None for rows that are read from a file, a folder, the hub or an iterator. Only the first row is searched for
    images and messages.

    Raises:
        ConfigurationError: `rows` has another type.
        DataError: a file or folder does not exist, or two columns have the same name.
    """
    if isinstance(rows, str | Path):
        if not is_hub_name(settings := TableSettings(source=str(rows))):
            refuse_missing_source(settings)
        return None
    library = sys.modules.get("datasets")
    tables = (list, tuple, pd.DataFrame, pa.Table, *((library.Dataset,) if library is not None else ()))
    if not isinstance(rows, (*tables, Mapping, bytes)) and isinstance(rows, Iterable):
        return None
    table: Any = rows
    head = table[:1] if isinstance(rows, pd.DataFrame | pa.Table) else table
    first: Any = next((row for row, _ in _rows(head, split)), {})
    if isinstance(first, BadRow):
        return None
    each_row = table if isinstance(rows, list | tuple) else [first]
    if others := [row for row in each_row if not isinstance(row, Mapping)]:
        raise _wrong_type(others[0], "a row")
    columns = {str(name) for row in each_row for name in row}
    images = {str(name) for name, value in first.items() if _is_image(value)} - {*IMAGE_COLUMNS}
    chat = isinstance(first.get(PROMPT), list | tuple | np.ndarray)
    return WrittenRows(len(table), tuple(sorted(columns)), chat, 0, tuple(sorted(images)))


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
        DataError: a source cannot be read, images are missing or damaged, or a value has no form in JSON.
    """
    count, most_images, chat, columns, other_images = 0, 0, False, set[str](), set[str]()
    bad = BadRows(ARGUMENTS[split], "refuse")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    target = folder / f"{split}.jsonl"
    with (part := target.with_suffix(".part")).open("w") as file:
        for number, (row, files) in enumerate(islice(_rows(rows, split), most)):
            count += 1
            if isinstance(row, BadRow):
                bad.add(f"row {number}", row)
                continue
            if not isinstance(row, Mapping):
                raise _wrong_type(row, "a row")
            try:
                values = {str(name): _value(value, str(name), folder, files) for name, value in row.items()}
                file.write(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")
            except BadRow as unusable:
                bad.add(f"row {number}", unusable)
                continue
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(
                    f"a value has no form in JSON: {error}",
                    code="value_not_json",
                    where=f"row {number} of {ARGUMENTS[split]}, columns {', '.join(map(str, row))}",
                    remedy="remove the column, or turn its values into text or numbers",
                ) from error
            columns |= values.keys()
            other_images |= {str(name) for name, value in row.items() if _is_image(value)} - {*IMAGE_COLUMNS}
            chat |= isinstance(values.get(PROMPT), list)
            most_images = max(most_images, _image_count(values))
    bad.check(count)
    part.replace(target)
    return WrittenRows(count, tuple(sorted(columns)), chat, most_images, tuple(sorted(other_images)))


def _image_count(values: Mapping[str, Any]) -> int:
    """Return the number of images in the columns and in the messages of a written row."""
    images = [values[name] for name in IMAGE_COLUMNS if values.get(name) is not None]
    count = sum(len(each) if isinstance(each, list) else 1 for each in images)
    messages = prompt if isinstance(prompt := values.get(PROMPT), list) else []
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return count + sum(any(key in part for key in MESSAGE_IMAGES) for part in parts)


def _is_image(value: Any) -> bool:
    """Return True if the value is an image of Pillow or of datasets, or a list of them."""
    if isinstance(value, list | tuple):
        return bool(value) and _is_image(value[0])
    return isinstance(value, Image.Image) or (isinstance(value, Mapping) and value.keys() == {"bytes", "path"})


def _rows(rows: Any, split: str) -> Iterator[tuple[Any, DataFiles | None]]:
    """Yield each row, and the files that paths in it refer to; None: the files of this machine."""
    if isinstance(rows, str | Path):
        yield from _source_rows(str(rows), split)
        return
    library = sys.modules.get("datasets")
    if isinstance(rows, pd.DataFrame | pa.Table):
        names = rows.column_names if isinstance(rows, pa.Table) else list(map(str, rows.columns))
        if len(set(names)) < len(names):
            raise DataError(
                "two columns have the same name",
                code="column_repeated",
                where=f"{ARGUMENTS[split]}, columns {', '.join(names)}",
                remedy="rename one of them",
            )
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
        rows = (_with_names(row, named) for row in rows)
    elif isinstance(rows, Mapping | bytes) or not isinstance(rows, Iterable):
        raise _wrong_type(rows, "a dataset")
    for row in rows:
        yield row, None


def _with_names(row: Row, readers: Mapping[str, Callable[[Any], Any]]) -> Row | BadRow:
    """Return a row with the names of class labels in place of their numbers."""
    try:
        return {**row, **{key: read(row[key]) for key, read in readers.items()}}
    except BadRow as unknown_label:
        return unknown_label


def _source_rows(source: str, split: str) -> Iterator[tuple[Row | BadRow, DataFiles]]:
    """Yield the rows of a file, a folder or a dataset of the hub, of which the newest commit is used."""
    settings = TableSettings(source=source)
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
    """Return a value for JSON, with images replaced by the names of their files below `folder`.

    Raises:
        BadRow: an image is missing or damaged.
    """
    nested = partial(_value, column=column, folder=folder, files=files)
    if column in IMAGE_COLUMNS or isinstance(value, Image.Image):
        return _image_names(value, column, folder, files)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.floating):
        value = float(str(value))  # the digits of float32's 0.1 are 0.1, not 0.10000000149
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping) and column in MESSAGES:
        # Datasets fill the fields that a message does not have with null.
        filled = {str(key): each for key, each in value.items() if each is not None}
        shows = str(filled.get("type")).startswith(("image", "video"))  # arguments of a tool call do not
        shown = {key: IMAGE_COLUMNS[0] for key in MESSAGE_IMAGES if shows and key in filled}
        if isinstance(url := filled.get("image_url"), Mapping) and url.keys() == {"url"} and shows:
            return filled | {"image_url": {"url": nested(url["url"], column=IMAGE_COLUMNS[0])}}
        return {key: nested(each, column=shown.get(key, column)) for key, each in filled.items()}
    if isinstance(value, Mapping):
        return {str(key): nested(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [nested(each) for each in value]
    return None if value is pd.NA or value is pd.NaT or isinstance(value, bytes) else plain_value(value)


def _image_names(value: Any, column: str, folder: Path, files: DataFiles | None) -> Any:
    """Store an image or a list of images, and return the names of their files; None for a missing value.

    Raises:
        BadRow: an image is missing or damaged, or has another type.
    """
    if isinstance(value, np.ndarray) and (value.ndim == 4 or value.dtype.kind in "OUS"):
        value = list(value)
    if isinstance(value, list | tuple):
        return [_image_names(each, column, folder, files) for each in value]
    if isinstance(value, Mapping) and "frames" in value:
        return {
            "frames": _image_names(value["frames"], column, folder, files),
            "times": _value(value.get("times"), "", folder, files),
        }
    if isinstance(value, Image.Image | np.ndarray):
        return _stored(_encoded(value, column), folder)
    value = str(value) if isinstance(value, PurePath) else value
    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value)):
        return None
    names = [_stored(_image_bytes(image, files), folder) for image in table_images(value, column)]
    return names if len(names) != 1 else names[0]


def _encoded(image: Image.Image | np.ndarray, column: str) -> bytes:
    if isinstance(image, np.ndarray) and (image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (3, 4)):
        raise BadRow("wrong_type", f"{column!r} is an array {image.shape} of {image.dtype}, not (H, W, 3) of uint8")
    try:
        return encode_png(image if isinstance(image, Image.Image) else Image.fromarray(image)).data
    except Exception as error:  # Pillow raises errors of any type for damaged files
        reason = error.what if isinstance(error, DataError) else said(error)
        raise BadRow("bad_image", f"{column!r}: {reason}") from error


def _image_bytes(image: TableImage, files: DataFiles | None) -> bytes:
    """Return the bytes of an image or video of a table. Without `files` its path is one of this machine.

    Raises:
        BadRow: there is no such file, or it is neither PNG, JPEG nor WebP.
    """
    if files is None:
        path = Path(image.path or "").absolute()
        files = FolderFiles(path.parent, links=True)
        if image.data is None and "://" not in str(image.path):
            image = TableImage(path.name, None)
    source = image.source(files)
    if isinstance(source, Path):
        return source.read_bytes()
    return source if isinstance(source, bytes) else source.data


def _stored(data: bytes, folder: Path) -> str:
    """Write the bytes of an image to the folder, unless they are there, and return the file's name below it."""
    name = f"images/{sha256(data).hexdigest()[:32]}"
    if not (folder / name).exists():
        (folder / f"{name}.part").write_bytes(data)
        (folder / f"{name}.part").replace(folder / name)
    return name
