"""A folder of images as rows: by its metadata files, or an image's class is the folder that it is in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from armature.components.contracts.errors import DataError
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.files import DataFiles
from armature.components.environments.dataset.shards import READERS, Row, Shard

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
METADATA = {f"metadata.{kind}": kind for kind in ("jsonl", "csv", "parquet")}
FILE_NAME, IMAGE, LABEL = "file_name", "image", "label"


class ClassFolder:
    """Images of one folder, with the columns `image`, a path, and `label`, the folder's name."""

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self.name, self._names = folder, names
        self.columns = {IMAGE, LABEL}

    def scan(self, wanted: Collection[str]) -> Iterator[Row | BadRow]:
        return (self.row(index) for index in range(len(self._names)))

    def row(self, index: int) -> Row:
        if not 0 <= index < len(self._names):
            raise DataError(f"there is no image {index} of {len(self._names)}", code="row_missing", where=self.name)
        return {IMAGE: self._names[index], LABEL: PurePosixPath(self.name).name}


class MetadataFolder:
    """Rows of a metadata file, whose `file_name` is the image, below the folder that the file is in.

    Images there that no row names are rows that cannot be used.
    """

    def __init__(self, rows: Shard, names: Collection[str]) -> None:
        self.name, self._rows, self._names = rows.name, rows, set(names)
        self._folder = PurePosixPath(rows.name).parent

    @property
    def columns(self) -> set[str]:
        return {*self._rows.columns, IMAGE}

    def scan(self, wanted: Collection[str]) -> Iterator[Row | BadRow]:
        left = set(self._names)
        for row in self._rows.scan({*wanted, FILE_NAME}):
            if isinstance(row, dict):
                row = self._with_image(row)
                left.discard(str(row[IMAGE]))
            yield row
        yield from (BadRow("no_metadata", f"{name} is not in {self.name}") for name in sorted(left))

    def row(self, index: int) -> Row:
        return self._with_image(self._rows.row(index))

    def _with_image(self, row: Row) -> Row:
        name: Any = row.get(FILE_NAME)
        return {**row, IMAGE: str(self._folder / name) if isinstance(name, str) and name else name}


def image_shards(files: DataFiles) -> list[Shard]:
    """
    Raises:
        DataError: there are no images.
    """
    names = files.names()
    described = {str(PurePosixPath(name).parent): name for name in names if PurePosixPath(name).name in METADATA}
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        path = PurePosixPath(name)
        if path.suffix.lower() in SUFFIXES:
            above = (str(folder) for folder in path.parents)
            found[next((folder for folder in above if folder in described), str(path.parent))].append(name)
    if not found:
        raise DataError("the folder has no PNG, JPEG or WebP files", code="images_missing", where=str(files))
    shards: list[Shard] = []
    for folder in sorted(found.keys() | described.keys()):
        if folder in described:
            table = described[folder]
            rows = READERS[METADATA[PurePosixPath(table).name]](files.path(table), table)
            shards.append(MetadataFolder(rows, found[folder]))
        else:
            shards.append(ClassFolder(folder, found[folder]))
    return shards
