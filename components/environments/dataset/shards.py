"""Readers of JSON Lines, JSON, CSV and Parquet files that scan all rows or return one row by its position."""

from __future__ import annotations

import csv
import io
import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from armature.components.artifacts.cache import DownloadCache, make_once
from armature.components.artifacts.tables import bounded_batches, without_dictionaries
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import read_bytes, regular
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.files import content_sha256, unreadable_file
from armature.components.environments.dataset.template import column_name
from armature.components.environments.dataset.values import column_values, read_json

BATCH = 256
"""Number of rows that are read together."""
LONGEST_LINE = 2**26
"""Largest number of bytes in a line of a JSON Lines file."""
LARGEST_JSON = 2**29
"""Largest number of bytes in a JSON file, which is read as a whole."""
LARGEST_CSV = 2**32
"""Largest number of bytes that a CSV file's values may take in memory."""
LONGEST_HEADER = 2**20
"""Largest number of characters in the first line of a CSV file."""
_SPACE = re.compile(r"[ \t\n\r]*")
COPY = 3
"""Format version of the copies of JSON and Parquet files in the cache; raise it when they are written differently."""

Row = dict[str, Any]


class Shard(Protocol):
    """The rows of one file or one split, with values as `armature.components.environments.dataset.values` lists them.

    `columns` holds the names of columns. For JSON Lines these are the names in the rows scanned so far.
    """

    name: str

    @property
    def columns(self) -> set[str]: ...

    def scan(self, wanted: Collection[str]) -> Iterator[Row | BadRow]:
        """Yield every row in order, with at least the columns `wanted`; a `BadRow` stands for an unreadable row."""

    def row(self, index: int) -> Row:
        """Return the row at a position with all its columns.

        Raises:
            BadRow: the row cannot be read.
            DataError: there is no such row.
        """


class JsonLinesRows:
    """A shard of a JSON Lines file, with one object per line. Empty lines do not count as rows."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.columns: set[str] = set()
        self._path = path
        self._starts = array("Q")
        start = 0
        with _opened(path) as file:
            for start, line, length in _lines(file):
                if line.strip():
                    self._starts.append(start)
                start += length
        self._starts.append(start)

    def scan(self, wanted: Collection[str]) -> Iterator[Row | BadRow]:
        with _opened(self._path) as file:
            for _, line, _ in _lines(file):
                if not line.strip():
                    continue
                try:
                    row = _parsed(line)
                    self.columns.update(row)
                    yield row
                except BadRow as bad:
                    yield bad

    def row(self, index: int) -> Row:
        _check_index(index, len(self._starts) - 1, self.name)
        with _opened(self._path) as file:
            file.seek(self._starts[index])
            return _parsed(file.read(min(self._starts[index + 1] - self._starts[index], LONGEST_LINE + 1)))


class ArrowRows:
    """A shard of Arrow data. `read(start, stop)` returns rows as a table, `values(name, column)` a column as a list."""

    def __init__(
        self,
        name: str,
        length: int,
        columns: Collection[str],
        read: Callable[[int, int], pa.Table],
        values: Callable[[str, pa.ChunkedArray], list[Any]] = lambda _, column: column_values(column),
    ) -> None:
        self.name, self._length, self._read, self._values = name, length, read, values
        self._stored = _by_name(columns, name)
        self.columns = set(self._stored)

    def scan(self, wanted: Collection[str]) -> Iterator[Row | BadRow]:
        for start in range(0, self._length, BATCH):
            table = self._read(start, min(start + BATCH, self._length))
            chosen = {name: stored for name, stored in self._stored.items() if name in wanted}
            try:
                columns = {name: self._values(stored, table[stored]) for name, stored in chosen.items()}
            except BadRow:
                yield from (self._row_or_bad(table.slice(number, 1), chosen) for number in range(table.num_rows))
            else:
                values = columns.items()
                yield from ({name: listed[number] for name, listed in values} for number in range(table.num_rows))

    def row(self, index: int) -> Row:
        _check_index(index, self._length, self.name)
        return self._only_row(self._read(index, index + 1), self._stored)

    def _only_row(self, table: pa.Table, columns: Mapping[str, str]) -> Row:
        return {name: self._values(stored, table[stored])[0] for name, stored in columns.items()}

    def _row_or_bad(self, table: pa.Table, columns: Mapping[str, str]) -> Row | BadRow:
        try:
            return self._only_row(table, columns)
        except BadRow as bad:
            return bad


def open_json(path: Path, name: str) -> JsonLinesRows:
    """Open a JSON file that holds a list of objects.

    A file that begins with an object is read as JSON Lines, because many files with the suffix .json are that.

    Raises:
        DataError: the file is neither.
    """
    with _opened(path) as file:
        first = file.read(2**16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first == b"{":
        return JsonLinesRows(path, name)

    def write(target: Path) -> None:
        remedy = "write JSON Lines, one object per line, which is read line by line"
        try:
            text = read_bytes(path, LARGEST_JSON, remedy).decode("utf-8-sig")
            with target.open("w", encoding="utf-8") as file:
                file.writelines(row.translate({10: " ", 13: " "}) + "\n" for row in _list_items(text))
        except (ValueError, RecursionError) as error:
            raise _unreadable(path, "JSON", error) from error

    return JsonLinesRows(_cached_copy(path, "jsonl", write), name)


def open_csv(path: Path, name: str) -> ArrowRows:
    """Open a CSV or TSV file. A column is numeric if Python writes every value the same way; otherwise it is text.

    Raises:
        DataError: the file is not UTF-8, or rows have more or fewer values than the header.
    """
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with regular(path).open(encoding="utf-8-sig", newline="") as file:
            text = file.read(LONGEST_HEADER)
        if len(text) == LONGEST_HEADER and "\n" not in text:
            raise DataError(
                f"the first line has more than {LONGEST_HEADER} characters", code="header_too_long", where=str(path)
            )
        header = next(csv.reader(io.StringIO(text, newline=""), delimiter=separator), [])
        if not header or len(set(header)) < len(header):
            raise DataError("the first line does not name each column once", code="column_repeated", where=str(path))
        reader = pa_csv.open_csv(
            path,
            parse_options=pa_csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), null_values=[""], strings_can_be_null=True
            ),
        )
        table = pa.Table.from_batches(_limited(reader, path), reader.schema)
    except (pa.ArrowException, csv.Error, ValueError, KeyError, OSError) as error:
        raise _unreadable(path, "CSV", error) from error
    for position, column in enumerate(header):
        table = table.set_column(position, column, _numbers(table[column]))
    return ArrowRows(name, table.num_rows, header, lambda start, stop: table.slice(start, stop - start))


def open_parquet(path: Path, name: str) -> ArrowRows:
    """Open a Parquet file by way of an Arrow copy in the cache, in which any row can be read without a scan.

    Raises:
        DataError: the file is not Parquet, or is damaged.
    """

    def write(target: Path) -> None:
        try:
            schema = pq.read_schema(path)
            if len(set(schema.names)) < len(schema.names):
                raise DataError("two columns have the same name", code="column_repeated", where=str(path))
            with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, without_dictionaries(schema)) as writer:
                for batch in _merged(bounded_batches(path, BATCH)):
                    batch.validate(full=True)  # a damaged page may decode to text that is not UTF-8
                    writer.write_batch(batch)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(path, "Parquet", error) from error

    table = pa.ipc.open_file(pa.memory_map(str(_cached_copy(path, "arrow", write)))).read_all()
    return ArrowRows(name, table.num_rows, table.column_names, lambda start, stop: table.slice(start, stop - start))


def _merged(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge small batches into batches of at least `BATCH` rows, because a row is found faster among few batches."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(each.num_rows for each in waiting) >= BATCH:
            yield from _joined(waiting)
            waiting = []
    yield from _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return batches if len(batches) < 2 else pa.Table.from_batches(batches).combine_chunks().to_batches()


def _by_name(stored: Iterable[str], where: str) -> dict[str, str]:
    """Return the stored columns' names by their normalized names, which settings and rewards use.

    Raises:
        DataError: two columns have the same normalized name.
    """
    names: dict[str, str] = {}
    for each in stored:
        if (other := names.setdefault(column_name(each), each)) != each:
            raise DataError(
                f"two columns have names that look the same: {other!a} and {each!a}",
                code="column_repeated",
                where=where,
                remedy="rename one of them",
            )
    return names


def _limited(batches: Iterable[pa.RecordBatch], path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a CSV file.

    Raises:
        DataError: they have more than `LARGEST_CSV` bytes.
    """
    size = 0
    for batch in batches:
        size += batch.nbytes
        if size > LARGEST_CSV:
            raise DataError(
                f"the CSV file has more than {LARGEST_CSV} bytes",
                code="table_too_large",
                where=str(path),
                remedy="write Parquet or JSON Lines",
            )
        yield batch


READERS: dict[str, Callable[[Path, str], Shard]] = {
    "jsonl": JsonLinesRows,
    "json": open_json,
    "csv": open_csv,
    "parquet": open_parquet,
}


def _cached_copy(path: Path, suffix: str, write: Callable[[Path], None]) -> Path:
    """Return the copy of a file in the cache, after making it with `write` if it is not there."""
    return make_once(DownloadCache.standard().folder / "tables" / f"{content_sha256(path)}-{COPY}.{suffix}", write)


def _list_items(text: str) -> Iterator[str]:
    """Yield the text of each item of a JSON list, without parsing the whole list, which takes 20 times the memory.

    Raises:
        ValueError, RecursionError: the text is not a JSON list.
    """
    decoder, end = json.JSONDecoder(parse_int=str), _SPACE.match(text).end()  # type: ignore[union-attr]
    if text[end : end + 1] != "[":
        raise ValueError("the file is not a list of objects")
    place = _SPACE.match(text, end + 1).end()  # type: ignore[union-attr]
    while text[place : place + 1] != "]" or text[end] == ",":
        _, end = decoder.raw_decode(text, place)
        yield text[place:end]
        end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        if text[end : end + 1] not in (",", "]"):
            raise ValueError(f"neither a comma nor the end of the list at character {end}")
        place = _SPACE.match(text, end + (text[end] == ",")).end()  # type: ignore[union-attr]
    if text[place + 1 :].strip():
        raise ValueError(f"there is more after the list, at character {place + 1}")


def _opened(path: Path) -> BinaryIO:
    try:
        return regular(path).open("rb")
    except OSError as error:
        raise unreadable_file(path, error) from error


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    """Yield start, content and length of each line. A line longer than `LONGEST_LINE` bytes is cut off after them."""
    start = 0
    while line := file.readline(LONGEST_LINE + 1):
        length = len(line)
        while not line.endswith(b"\n") and length > LONGEST_LINE and (rest := file.readline(LONGEST_LINE)):
            length += len(rest)
            if rest.endswith(b"\n"):
                break
        yield start, line, length
        start += length


def _parsed(line: bytes) -> Row:
    if len(line) > LONGEST_LINE:
        raise BadRow("too_long", f"a line of more than {LONGEST_LINE} bytes")
    try:
        row = read_json(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadRow("unreadable", f"not JSON in UTF-8: {error}") from None
    if not isinstance(row, dict):
        raise BadRow("unreadable", f"a line holds {type(row).__name__}, not an object with columns")
    try:
        return {name: row[stored] for name, stored in _by_name(row, "").items()}
    except DataError as error:
        raise BadRow("unreadable", error.what) from None


def _check_index(index: int, length: int, name: str) -> None:
    if not 0 <= index < length:
        raise DataError(
            f"there is no row {index} of {length}", code="row_missing", where=name, remedy="make the tasks again"
        )


def _unreadable(path: Path, kind: str, error: Exception) -> DataError:
    return DataError(f"the file cannot be read as {kind}: {str(error)[:500]}", code="table_unreadable", where=str(path))


def _numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a text column as numbers if no digit is lost: 7 and 0.5 become numbers, 007 and 1.50 stay text."""
    texts = column.to_pylist()
    for read, kind in ((int, pa.int64()), (float, pa.float64())):
        try:
            values = [None if text is None else read(text) for text in texts]
            if any(value is not None for value in values) and all(
                value is None or repr(value) == text for value, text in zip(values, texts, strict=True)
            ):
                return pa.chunked_array([pa.array(values, kind)])
        except (ValueError, OverflowError, pa.ArrowException):
            continue
    return column
