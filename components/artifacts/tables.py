"""Parquet tables with a name and a version; equal rows give equal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import regular

NAME_KEY, VERSION_KEY = b"armature.schema", b"armature.schema_version"

IMAGE_REF = pa.struct(
    [("sha256", pa.string()), ("media_type", pa.string()), ("width", pa.int32()), ("height", pa.int32())]
)


@dataclass(frozen=True)
class TableSchema:
    """`version` is raised whenever a column is added, removed or changes its meaning."""

    name: str
    version: int
    schema: pa.Schema

    @property
    def stored(self) -> pa.Schema:
        return self.schema.with_metadata({NAME_KEY: self.name.encode(), VERSION_KEY: str(self.version).encode()})


def write_table(path: Path, table: pa.Table | list[dict[str, object]], schema: TableSchema) -> None:
    """Write rows in their order.

    Raises:
        DataError: a row does not fit the schema.
    """
    try:
        if not isinstance(table, pa.Table):
            table = pa.Table.from_pylist(table, schema=schema.stored)
        pq.write_table(table.cast(schema.stored), path.absolute(), compression="zstd", store_schema=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError) as error:
        raise DataError(
            f"rows do not fit schema {schema.name!r}: {error}", code="row_schema_mismatch", where=str(path)
        ) from error


def read_table(
    path: Path, schema: TableSchema, where: Mapping[str, str] | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """
    Args:
        where: only rows with these values, by column; the others are not decoded.
        columns: only these.

    Raises:
        DataError: no such file, not Parquet, another table, or another version of this one.
    """
    try:
        filters = [(name, "=", value) for name, value in where.items()] if where else None
        # Arrow takes a relative path that begins with "~" or "name:" for a home folder or a URL.
        table = pq.read_table(regular(path).absolute(), filters=filters, columns=list(columns) if columns else None)
    except (FileNotFoundError, pa.ArrowInvalid, OSError) as error:
        raise DataError(f"the table cannot be read: {error}", code="table_unreadable", where=str(path)) from error
    metadata = table.schema.metadata or {}
    found = (metadata.get(NAME_KEY, b"").decode(), metadata.get(VERSION_KEY, b"").decode())
    if found != (schema.name, str(schema.version)):
        raise DataError(
            f"expected table {schema.name!r} of version {schema.version}, "
            f"found {found[0] or 'no name'!r} of version {found[1] or 'none'}",
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
