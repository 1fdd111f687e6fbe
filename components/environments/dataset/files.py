"""The files of a dataset, in a folder or behind an fsspec URL: names below it that never leave it."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Protocol

from fsspec.utils import glob_translate

from armature.components.artifacts.cache import DownloadCache, file_sha256, file_state, make_once
from armature.components.artifacts.fetched import FetchedFiles, list_files
from armature.components.contracts.digests import document_digest
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import confined, is_folder, regular

READERS = 4


class DataFiles(Protocol):
    """Files by their names below a root."""

    def names(self) -> list[str]:
        """All of them, sorted; hidden ones are left out."""

    def has(self, name: str) -> bool:
        """
        Raises:
            DataError: the name leaves the root.
        """

    def path(self, name: str) -> Path:
        """The file on this machine, fetched where it is not yet.

        Raises:
            DataError: the name leaves the root, or the file cannot be fetched.
        """

    def digest(self, names: Sequence[str]) -> str:
        """Changes with what is in those of these files that there are."""


@dataclass(frozen=True)
class FolderFiles:
    """Files in a folder. A link that leads out of it is refused, unless `links` says that the names are the user's."""

    root: Path
    links: bool = False

    def __str__(self) -> str:
        return str(self.root)

    @cached_property
    def _real(self) -> str:
        return os.path.realpath(self.root)

    def names(self) -> list[str]:
        return sorted(self._walk())

    def _walk(self) -> Iterator[str]:
        for parent, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            below = Path(parent).relative_to(self.root)
            yield from ((below / name).as_posix() for name in names if not name.startswith("."))

    @cached_property
    def _inside(self) -> dict[str, bool]:
        """Folders that were looked at, and whether they are in the root when links are followed."""
        return {}

    def has(self, name: str) -> bool:
        return os.path.isfile(self.path(name))  # noqa: PTH113 (no error for a name that is too long)

    def path(self, name: str) -> Path:
        path = self.root / (name if self._is_spelled_so(name) else confined(name, str(self.root)))
        if self.links:
            return path
        folder = str(path.parent)
        if folder not in self._inside:
            self._inside[folder] = self._is_inside(folder)
        is_link = os.path.islink(path)  # noqa: PTH114 (no error for a name that is too long)
        if not self._inside[folder] or (is_link and not self._is_inside(path)):
            raise DataError(
                f"{name[:200]!r} is a link that leads out of its folder",
                code="link_leaves_folder",
                where=str(self.root),
                remedy="put the file itself there, or set environment.args.root to a folder that has both",
            )
        return path

    def _is_spelled_so(self, name: str) -> bool:
        """Check for a file of exactly this name, which may hold a backslash or a colon that `confined` reads."""
        plain = bool(name) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")
        return plain and os.path.isfile(self.root / name)  # noqa: PTH113 (no error for a name that is too long)

    def _is_inside(self, path: str | Path) -> bool:
        return (os.path.realpath(path) + os.sep).startswith(self._real.rstrip(os.sep) + os.sep)

    def digest(self, names: Sequence[str]) -> str:
        """SHA-256 of their content, kept for as long as their sizes, times and inodes stay."""
        there = [name for name in names if self._is_here(name)]
        facts = sha256(os.fsencode(self._real))
        for name in there:
            facts.update(os.fsencode(f"{name}\0{file_state(self.root / name)}\n"))

        def write(target: Path) -> None:
            with ThreadPoolExecutor(READERS) as pool:
                digests = pool.map(_sha256, (self.root / name for name in there))
                target.write_text(document_digest(dict(zip(there, digests, strict=True))))

        return make_once(DownloadCache.standard().folder / "digests" / facts.hexdigest(), write).read_text()

    def _is_here(self, name: str) -> bool:
        try:
            return self.has(name)
        except (DataError, ValueError, OSError):
            return False


@dataclass(frozen=True)
class UrlFiles:
    """Files behind a URL; `version` of a file is what its filesystem says changes with its content."""

    files: FetchedFiles

    def __str__(self) -> str:
        return str(self.files)

    def names(self) -> list[str]:
        return sorted(self.files.listing.files)

    def has(self, name: str) -> bool:
        return self.files.has(confined(name, str(self)))

    def path(self, name: str) -> Path:
        return self.files.path(confined(name, str(self)))

    def digest(self, names: Sequence[str]) -> str:
        listed = self.files.listing.files
        return document_digest({name: [listed[name].size, listed[name].version] for name in names if name in listed})


def open_folder(place: str, links: bool = False) -> DataFiles:
    """The files in a folder or below a URL; `links`: also links that lead out of it.

    Raises:
        ConfigurationError: what the URL's protocol needs is not installed.
        DataError: there is nothing, or it cannot be reached.
    """
    if "://" not in place:
        if not is_folder(place):
            raise DataError(
                "there is no such folder",
                code="data_folder_missing",
                where=place,
                remedy="correct environment.args.source or root",
            )
        return FolderFiles(Path(place).absolute(), links)
    url = place.rstrip("/")
    return UrlFiles(
        FetchedFiles.opened(url, list_files(url, lambda name: not _is_hidden(name)), DownloadCache.standard())
    )


def matches(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that match a glob, in which ** stands for any folders, and those in the folder of that name.

    A name, or the leading folders of one, that is spelled exactly as the pattern is meant itself: "[v2]/*.csv" are the
    tables in the folder "[v2]", if there is one.

    Raises:
        ConfigurationError: it is not a glob.
    """
    pattern = pattern.rstrip("/") or "."
    if pattern in names:
        return [pattern]
    folder = pattern
    while folder and not any(name.startswith(f"{folder}/") for name in names):
        folder = folder.rpartition("/")[0]
    rest = pattern[len(folder) :]
    try:
        expression = re.compile(glob_translate(glob.escape(folder) + rest))
    except (ValueError, re.error) as error:
        raise ConfigurationError(
            f"{pattern!r} is not a pattern: {error}",
            code="invalid_pattern",
            where="environment.args",
            remedy="write ** as a folder of its own, as in data/**/*.csv, and [*] for the character itself",
        ) from error
    return [name for name in names if expression.match(name) or name.startswith(f"{pattern}/")]


def content_sha256(path: Path) -> str:
    """
    Raises:
        DataError: it cannot be read.
    """
    try:
        return file_sha256(path)
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror}", code="data_file_unreadable", where=str(path)
        ) from error


def _sha256(path: Path) -> str:
    with regular(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
