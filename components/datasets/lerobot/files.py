"""Where the files of a dataset are: in a folder, or wherever they can be fetched from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from armature.components.artifacts.cache import file_sha256, file_state
from armature.components.artifacts.fetched import listing_digest
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import regular
from armature.components.datasets.lerobot.layout import INFO, TASKS


class DatasetFiles(Protocol):
    """The files of one dataset, named by their paths in it. Pickles: other processes open the same files."""

    @property
    def root(self) -> Path:
        """The folder that holds them, or those that were fetched."""

    def names(self, part: str = "") -> list[str]:
        """All files that a dataset consists of, or those below `part`, sorted; meta/stats.json is not among them."""

    def has(self, name: str | PurePosixPath) -> bool: ...

    def path(self, name: str | PurePosixPath) -> Path:
        """The file on this machine, fetched where it is not yet; it need not exist in a folder.

        Raises:
            DataError: it cannot be fetched.
        """

    def view(self, name: str | PurePosixPath, whole: bool) -> AbstractContextManager[Path | IO[bytes]]:
        """The file for reading. What is not on this machine is fetched as far as it is read, or if it is going to be
        read as a `whole`, by anyone and in time, completely.

        Raises:
            DataError: it cannot be reached, or is not what it was.
        """

    def version(self, name: str | PurePosixPath) -> str:
        """Names the file and its content; needs no fetching."""

    def digest(self) -> str:
        """SHA-256 of what is in the dataset, without meta/stats.json, which is computed from the rest."""

    def quick_digest(self) -> str:
        """SHA-256 of what is listed: of files in meta/ the content, of others name, size, and time or ETag.

        Reads no data and no video. Who changes a file and keeps its size and time is not seen.
        """


def belongs(name: str) -> bool:
    """Whether a file of that name is part of a dataset's content."""
    tables = name.startswith(("meta/episodes/", "data/")) and name.endswith(".parquet")
    return name in (INFO, TASKS) or tables or (name.startswith("videos/") and name.endswith(".mp4"))


@dataclass(frozen=True)
class LocalFiles:
    """Files in a folder of this machine."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def names(self, part: str = "") -> list[str]:
        folders = [self.root / each for each in ([part] if part else ["meta", "data", "videos"])]
        walked = (found for folder in folders for found in os.walk(folder))
        paths = (f"{folder}/{name}" for folder, _, names in walked for name in names)
        names = (path[len(str(self.root)) + 1 :] for path in paths)
        return sorted(name for name in names if belongs(name))

    def has(self, name: str | PurePosixPath) -> bool:
        return (self.root / name).is_file()

    def path(self, name: str | PurePosixPath) -> Path:
        return self.root / name

    def view(self, name: str | PurePosixPath, whole: bool) -> AbstractContextManager[Path | IO[bytes]]:
        return nullcontext(regular(self.root / name))

    def version(self, name: str | PurePosixPath) -> str:
        """By the times that the file was changed, which costs no reading.

        Raises:
            DataError: there is no such file.
        """
        path = (self.root / name).resolve()
        try:
            return f"{path}\0{file_state(path)}"
        except OSError as error:
            raise DataError(
                f"the file cannot be read: {error.strerror}",
                code="data_file_unreadable",
                where=str(self.root / name),
                remedy="fetch it again",
            ) from error

    def digest(self) -> str:
        """
        Raises:
            DataError: there is no dataset.
        """
        return self._digest(lambda name: _sha256(self.root / name))

    def quick_digest(self) -> str:
        """
        Raises:
            DataError: there is no dataset.
        """
        return self._digest(self._listed)

    def _listed(self, name: str) -> str:
        if name.startswith("meta/"):
            return file_sha256(self.root / name)
        state = (self.root / name).stat()
        return f"{state.st_size} {state.st_mtime_ns}"

    def _digest(self, of: Callable[[str], str]) -> str:
        names = self.names()
        if INFO not in names:
            raise DataError(
                "not a LeRobot dataset: it has no meta/info.json", code="not_a_lerobot_dataset", where=str(self.root)
            )
        with ThreadPoolExecutor() as executor:
            digests = executor.map(of, names)
            return listing_digest(dict(zip(names, digests, strict=True)))


def _sha256(path: Path) -> str:
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
