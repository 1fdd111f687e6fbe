"""Parquet tables whose file metadata has the table's name and version. Equal rows give equal bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import regular

NAME_KEY, VERSION_KEY = b"armature.schema", b"armature.schema_version"
"""Keys in the Parquet metadata under which a table's name and version are stored."""

GROUP_ROWS = 4096
"""Number of rows of a Parquet row group. To find few rows of a large table, only the groups that may have them are
decoded."""

IMAGE_REF = pa.struct(
    [("sha256", pa.string()), ("media_type", pa.string()), ("width", pa.int32()), ("height", pa.int32())]
)
"""Arrow type of a column whose values are references to images in the image store."""


@dataclass(frozen=True)
class TableSchema:
    """Name, version and columns of a table. `version` is raised whenever a column is added, removed or changes its
    meaning.

    Example:
        >>> import tempfile
        >>> schema = TableSchema("scores", 1, pa.schema([("task", pa.string()), ("score", pa.float64())]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_table(Path(folder, "scores.parquet"), [{"task": "a", "score": 0.5}], schema)
        ...     read_table(Path(folder, "scores.parquet"), schema).to_pylist()
        [{'task': 'a', 'score': 0.5}]
    """

    name: str
    version: int
    schema: pa.Schema

    @property
    def stored(self) -> pa.Schema:
        """Return the Arrow schema that is written to the file. Its metadata has the table's name and version."""
        return self.schema.with_metadata({NAME_KEY: self.name.encode(), VERSION_KEY: str(self.version).encode()})


def packed_array(array: npt.NDArray[Any] | None) -> bytes | None:
    """Return an array of any shape as the bytes of an .npy file, for a column of type binary; None stays None."""
    if array is None:
        return None
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def unpacked_array(data: bytes | None) -> npt.NDArray[Any] | None:
    """Return the array of `packed_array`.

    Raises:
        ValueError: `data` is not an .npy file of numbers.
    """
    return None if data is None else np.asarray(np.load(io.BytesIO(data), allow_pickle=False))


def write_table(path: Path, table: pa.Table | list[dict[str, object]], schema: TableSchema) -> None:
    """Write rows to a Parquet file, in their order.

    Raises:
        DataError: a row does not fit the schema.
    """
    try:
        if not isinstance(table, pa.Table):
            table = pa.Table.from_pylist(table, schema=schema.stored)
        pq.write_table(
            table.cast(schema.stored),
            path.absolute(),
            row_group_size=GROUP_ROWS,
            compression="zstd",
            store_schema=True,
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError) as error:
        raise DataError(
            f"rows do not fit schema {schema.name!r}: {error}", code="row_schema_mismatch", where=str(path)
        ) from error


def read_table(
    path: Path, schema: TableSchema, where: Mapping[str, str] | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Read a table that `write_table` wrote.

    Args:
        where: return only rows with these values, by column; other rows are not decoded.
        columns: return only these columns.

    Raises:
        DataError: the file is missing, is not Parquet, or contains another table or another version of this one.
    """
    try:
        filters = [(name, "=", value) for name, value in where.items()] if where else None
        # Arrow takes a relative path that begins with "~" or "name:" for a home folder or a URL.
        table = pq.read_table(regular(path).absolute(), filters=filters, columns=list(columns) if columns else None)
    except (FileNotFoundError, pa.ArrowInvalid, OSError) as error:
        raise DataError(f"the table cannot be read: {error}", code="table_unreadable", where=str(path)) from error
    metadata = table.schema.metadata or {}
    name, version = metadata.get(NAME_KEY, b"").decode(), metadata.get(VERSION_KEY, b"").decode()
    if (name, version) != (schema.name, str(schema.version)):
        raise DataError(
            f"expected table {schema.name!r} of version {schema.version}, "
            f"found {name or 'no name'!r} of version {version or 'none'}",
            code="table_version_mismatch",
            where=str(path),
            remedy="run the stage that wrote it again with this version of armature",
        )
    expected = pa.schema([schema.schema.field(name) for name in columns]) if columns else schema.schema
    if not table.schema.equals(expected, check_metadata=False):
        raise DataError(
            f"the columns of {schema.name!r} are not those of version {schema.version}",
            code="table_columns_mismatch",
            where=str(path),
            remedy=f"expected {expected.names}, found {table.schema.names}",
        )
    return table


# --- Parquet files that other programs wrote ---

MIN_LIMIT_BYTES = 3 * 2**26
"""Number of decoded bytes that any Parquet file is allowed, however small the file is."""
MAX_RATIO = 200
"""Number of decoded bytes that a larger Parquet file is allowed per byte of the file. Texts written by people compress
less than this."""
BATCH_BYTES = 2**28
"""Largest size of one record batch after decoding, in bytes."""


def bounded_batches(source: Path | IO[bytes], rows: int, where: str = "", **choice: Any) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a Parquet file from another source, with a limit on the decoded bytes.

    300 bytes of Parquet can stand for gigabytes, so the decoded size is checked while reading.

    Args:
        source: path or open file.
        rows: largest number of rows in a batch.
        where: name of the file in errors; default: `source`.
        choice: columns and row groups, as pyarrow's `iter_batches` takes them.

    Raises:
        DataError: the file decodes to far more bytes than it has. This is noticed before so much is decoded.
        OSError, ValueError, ArrowException: the file is not Parquet, or damaged.
    """
    place = where or str(source)
    if isinstance(source, Path):
        regular(source)
    with pq.ParquetFile(source, pre_buffer=not isinstance(source, Path)) as file:
        limit, metadata = decoded_limit(source), file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
        if max(metadata.num_rows, sum(chunk.total_uncompressed_size for chunk in chunks)) > limit:
            raise _too_large(limit, place)
        # Rows may all refer to one value of a dictionary, which is at most as large as its chunk.
        largest = max((chunk.total_uncompressed_size for chunk in chunks if chunk.has_dictionary_page), default=1)
        decoded = 0
        for batch in file.iter_batches(max(1, min(rows, BATCH_BYTES // max(largest, 1))), **choice):
            plain = batch.cast(without_dictionaries(batch.schema))
            decoded += plain.nbytes
            if decoded > limit:
                raise _too_large(limit, place)
            yield plain


def without_dictionaries(schema: pa.Schema) -> pa.Schema:
    """Return the schema with dictionary columns replaced by plain ones: each row group may have another dictionary of a
    column."""
    fields = [each.with_type(each.type.value_type) if pa.types.is_dictionary(each.type) else each for each in schema]
    return pa.schema(fields, schema.metadata)


def read_parquet(source: Path | IO[bytes], where: str = "", **choice: Any) -> pa.Table:
    """Read a whole Parquet file from another source, or the part that `choice` selects; see `bounded_batches` for
    errors."""
    batches = list(bounded_batches(source, 2**16, where, **choice))
    if batches:
        return pa.Table.from_batches(batches)
    with pq.ParquetFile(source) as file:
        return file.read_row_groups([], columns=choice.get("columns"))


def decoded_limit(source: Path | IO[bytes]) -> int:
    """Return the number of bytes that the content of a file may decode to."""
    if isinstance(source, Path):
        return max(MIN_LIMIT_BYTES, MAX_RATIO * source.stat().st_size)
    place = source.tell()
    size = source.seek(0, os.SEEK_END)
    source.seek(place)
    return max(MIN_LIMIT_BYTES, MAX_RATIO * size)


def _too_large(limit: int, where: str) -> DataError:
    return DataError(
        f"the file decodes to more than {limit} bytes, {MAX_RATIO} times its size: it repeats one value",
        code="table_too_large",
        where=where,
        remedy="if that is intended, write it as JSON Lines, and move text that all rows share into the prompt",
    )
