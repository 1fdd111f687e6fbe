"""The files of a dataset, in a folder or behind an fsspec URL. Names are relative to that root and cannot leave it."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
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


class DataFiles(Protocol):
    """Files below a root, a local folder or a URL, by their relative names."""

    def names(self) -> list[str]:
        """Return the sorted names of all files that are not hidden."""

    def has(self, name: str) -> bool:
        """Check if there is a file of this name.

        Raises:
            DataError: the name leaves the root.
        """

    def path(self, name: str) -> Path:
        """Return the file's path on this machine, after fetching the file if necessary.

        Raises:
            DataError: the name leaves the root, or the file cannot be fetched.
        """

    def digest(self, names: Sequence[str]) -> str:
        """Return a digest of the contents of the named files. Names without a file are skipped."""


@dataclass(frozen=True)
class FolderFiles:
    """Files in a local folder.

    A symbolic link that leads out of the folder is an error, unless `links` is True: then names come from the user's
    own settings and not from data.
    """

    root: Path
    links: bool = False

    def __str__(self) -> str:
        return str(self.root)

    @cached_property
    def _real(self) -> str:
        return os.path.realpath(self.root)

    def names(self) -> list[str]:
        files: list[str] = []
        for parent, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            below = Path(parent).relative_to(self.root)
            files += ((below / name).as_posix() for name in names if not name.startswith("."))
        return sorted(files)

    @cached_property
    def _inside(self) -> dict[str, bool]:
        """Cache: for each folder checked so far, True if it is inside the root after following links."""
        return {}

    def has(self, name: str) -> bool:
        return os.path.isfile(self.path(name))  # noqa: PTH113 (no error for a name that is too long)

    def path(self, name: str) -> Path:
        path = self.root / (name if self._exists_verbatim(name) else confined(name, str(self.root)))
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
                remedy="replace the link by the file, or set environment.args.root to a folder that contains both",
            )
        return path

    def _exists_verbatim(self, name: str) -> bool:
        """Check for a file of exactly this name. It may contain a backslash or colon, which `confined` interprets."""
        plain = bool(name) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")
        return plain and os.path.isfile(self.root / name)  # noqa: PTH113 (no error for a name that is too long)

    def _is_inside(self, path: str | Path) -> bool:
        return (os.path.realpath(path) + os.sep).startswith(self._real.rstrip(os.sep) + os.sep)

    def digest(self, names: Sequence[str]) -> str:
        """Return a digest of the files' SHA-256, cached on disk for as long as sizes, times and inodes are
        unchanged."""
        there = [name for name in names if self._is_here(name)]
        facts = sha256(os.fsencode(self._real))
        for name in there:
            facts.update(os.fsencode(f"{name}\0{file_state(self.root / name)}\n"))

        def write(target: Path) -> None:
            with ThreadPoolExecutor(4) as pool:
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
    """Files behind a URL. The digest uses each file's size and `version`, such as an ETag, without fetching the
    file."""

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
    """Return the files in a folder or below a URL. `links` allows symbolic links that lead out of the folder.

    Raises:
        ConfigurationError: a package that the URL's protocol needs is not installed.
        DataError: the folder does not exist, or the URL cannot be reached.
    """
    if "://" not in place:
        if not is_folder(place):
            raise DataError(
                "the folder does not exist",
                code="data_folder_missing",
                where=place,
                remedy="correct environment.args.source or root",
            )
        return FolderFiles(Path(place).absolute(), links)
    url = place.rstrip("/")
    listing = list_files(url, lambda name: not any(part.startswith(".") for part in name.split("/")))
    return UrlFiles(FetchedFiles.opened(url, listing, DownloadCache.standard()))


def matches(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that match a glob (** matches any folders), or that are in a folder with the pattern's name.

    A file or leading folder whose name equals the pattern's text literally is preferred: "[v2]/*.csv" means the tables
    in the folder "[v2]" if that folder exists.

    Raises:
        ConfigurationError: the pattern is not a glob.

    Example:
        >>> matches("a/*.csv", ["a/1.csv", "a/b/2.csv", "c.csv"]), matches("a", ["a/1.csv", "a/b/2.csv", "c.csv"])
        (['a/1.csv'], ['a/1.csv', 'a/b/2.csv'])
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
            remedy="write ** as a whole path part, as in data/**/*.csv, and [*] for a literal asterisk",
        ) from error
    return [name for name in names if expression.match(name) or name.startswith(f"{pattern}/")]


def content_sha256(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return file_sha256(path)
    except OSError as error:
        raise unreadable_file(path, error) from error


def unreadable_file(path: Path, error: OSError) -> DataError:
    """Return the error for a file that the operating system cannot open or read."""
    return DataError(f"the file cannot be read: {error.strerror}", code="data_file_unreadable", where=str(path))


def _sha256(path: Path) -> str:
    with regular(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
