"""Files of tables and datasets behind a URL: a file is fetched when it is first asked for, and kept."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

import fsspec
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from tqdm import tqdm

from armature.components.artifacts.cache import DownloadCache, make_once
from armature.components.artifacts.disk import try_lock
from armature.components.artifacts.remote_folder import NO_CALLBACK, RemoteFiles, Source
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import confined
from armature.components.contracts.installation import install_command

BLOCKS = {"cache_type": "blockcache", "block_size": 2**20, "cache_options": {"maxblocks": 8}}
"""How fsspec reads a file here and there: 1 MiB at a time, the last 8 are kept."""
VERSIONS = ("ETag", "etag", "sha256", "md5", "mtime", "LastModified", "last_modified", "created")
"""What filesystems call the thing that changes with a file's content, best first."""


class RemoteFile(BaseModel):
    """A file where it comes from; `version` changes with its content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: NonNegativeInt
    version: str


class FileListing(BaseModel):
    """All files of a dataset by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: dict[str, RemoteFile]


@dataclass(frozen=True)
class FetchedFiles:
    """Files that `url` has; `listing` was read when it was opened, and what arrives is compared with it.

    With `ranges` no file is fetched but for those in meta/: data and videos are read where they lie.
    """

    url: str
    listing: FileListing
    root: Path
    limit_bytes: int
    ranges: bool = False

    @classmethod
    def opened(cls, url: str, listing: FileListing, cache: DownloadCache) -> Self:
        """Files of other content lie in another folder, so that a changed bucket is not taken for the old one."""
        content = listing_digest({name: entry.version for name, entry in listing.files.items()})
        return cls(url, listing, fetched_home(url, cache) / content[:16], cache.limit_bytes, cache.ranges)

    def __str__(self) -> str:
        return self.url

    def names(self, part: str = "") -> list[str]:
        """All files, or those below `part`, sorted."""
        return sorted(name for name in self.listing.files if name.startswith(part))

    def has(self, name: str | PurePosixPath) -> bool:
        return str(name) in self.listing.files

    def digest(self) -> str:
        files = self.listing.files
        return listing_digest({name: f"{files[name].size} {files[name].version}" for name in self.names()})

    def quick_digest(self) -> str:
        return self.digest()

    def path(self, name: str | PurePosixPath) -> Path:
        """
        Raises:
            DataError: there is no such file, it cannot be fetched, or the dataset would fetch more than it may.
        """
        return self.fetch(name)

    def fetch(self, name: str | PurePosixPath, callback: fsspec.Callback = NO_CALLBACK) -> Path:
        """As `path`; `callback` hears of every part that arrives, and what it raises ends the fetching.

        Raises:
            DataError: as of `path`.
        """
        target, entry = self.root / name, self._entry(name)
        if target.is_file():
            return target
        with self._room(str(name), entry):
            return make_once(target, partial(self._fetch, str(name), entry, callback))

    @contextmanager
    def view(self, name: str | PurePosixPath, whole: bool) -> Iterator[Path | IO[bytes]]:
        target, entry = self.root / name, self._entry(name)
        if target.is_file() or (whole and not self.ranges):
            yield self.path(name)
            return
        try:
            options = BLOCKS if whole else {"cache_type": "none"}
            file = _opened(self.url).open(Source(str(name), entry.size), **options)
        except DataError:
            raise
        except Exception as error:  # each kind of filesystem has errors of its own
            raise DataError(
                f"{str(name)!r} cannot be read: {error!r:.300}", code="remote_file_unreadable", where=self.url
            ) from error
        with file:
            yield file

    def version(self, name: str | PurePosixPath) -> str:
        return f"{self.url}\0{name}\0{self._entry(name)}"

    def _entry(self, name: str | PurePosixPath) -> RemoteFile:
        entry = self.listing.files.get(str(name))
        if entry is None:
            raise DataError(f"the dataset has no file {str(name)!r}", code="remote_file_missing", where=self.url)
        return entry

    @cached_property
    def _all_bytes(self) -> int:
        return sum(entry.size for entry in self.listing.files.values())

    @contextmanager
    def _room(self, name: str, entry: RemoteFile) -> Iterator[None]:
        """Holds the bytes of a file on its way, of those that the dataset may take: other processes count them.

        Raises:
            DataError: the dataset would take more.
        """
        if self._all_bytes <= self.limit_bytes:  # counting takes its time
            yield
            return
        folder = self.root / ".arriving"
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            with _locked(folder / "counting"):
                arriving = {mark.name for mark in folder.iterdir() if _is_locked(mark)}
                files = self.listing.files.items()
                here = {key for key, _ in files if _mark(key) in arriving or (self.root / key).is_file()}
                fetched = sum(each.size for key, each in files if key in here)
                if name not in here and fetched + entry.size > self.limit_bytes:
                    raise DataError(
                        f"{name!r} has {entry.size / 1e9:.3g} GB: with the {fetched / 1e9:.3g} GB fetched before, "
                        f"more than the {self.limit_bytes / 1e9:.3g} GB that one dataset may take",
                        code="fetch_limit_exceeded",
                        where=self.url,
                        remedy="choose fewer episodes or cameras, raise ARMATURE_FETCH_LIMIT_GB, or read the files "
                        "where they lie: ARMATURE_FETCH=ranges",
                    )
                if name not in here:
                    held.enter_context(_locked(folder / _mark(name)))
            yield

    def _fetch(self, name: str, entry: RemoteFile, callback: fsspec.Callback, target: Path) -> None:
        try:
            _opened(self.url).get({target: Source(name, entry.size)}, callback)
        except DataError:
            raise
        except Exception as error:  # each kind of filesystem has errors of its own
            raise DataError(
                f"{name!r} cannot be fetched: {error!r:.300}", code="remote_file_not_fetched", where=self.url
            ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        return not try_lock(file)


def _mark(name: str) -> str:
    """The name of what is locked while a file is on its way."""
    return hashlib.sha256(name.encode()).hexdigest()


def listing_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 over names and what stands for the content of each."""
    listing = "".join(f"{name}\0{digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(os.fsencode(listing)).hexdigest()


def list_files(url: str, wanted: Callable[[str], bool]) -> FileListing:
    """What is below `url`, of names that are wanted.

    Raises:
        ConfigurationError: what the protocol needs is not installed.
        DataError: it cannot be reached.
    """
    remote = _opened(url)
    try:
        found = remote.facts()
    except Exception as error:  # each kind of filesystem has errors of its own
        raise DataError(
            f"the dataset cannot be reached: {str(error).splitlines()[0] if str(error) else repr(error)}",
            code="dataset_unreachable",
            where=url,
            remedy="check the name, the revision and the network, log in for a gated dataset, or give a folder",
        ) from error
    files = {}
    for name, facts in found.items():
        if wanted(name) and facts.get("type", "file") == "file":  # a folder has pipes and devices too
            files[str(confined(name, url))] = _remote_file(facts, f"{url}/{name}")
    return FileListing(files=files)


def _opened(url: str) -> RemoteFiles:
    """
    Raises:
        ConfigurationError: what the protocol needs is not installed, or cannot be reached.
    """
    try:
        return RemoteFiles(url, tqdm.write)
    except Exception as error:  # each kind of filesystem has errors of its own, and some connect at once
        remedy = f"{install_command('s3')} for s3://, or what fsspec names for another protocol"
        raise ConfigurationError(
            f"the URL cannot be opened: {error}", code="url_not_supported", where=url, remedy=remedy
        ) from error


def _remote_file(facts: Mapping[str, Any], where: str) -> RemoteFile:
    """What a filesystem says of a file; a hub names the content itself.

    Raises:
        DataError: it says nothing that changes with the content, so that a kept copy could be an old one.
    """
    version = next((str(facts[key]) for key in VERSIONS if facts.get(key) is not None), None)
    if facts.get("blob_id"):
        version = str(facts["lfs"]["sha256"] if facts.get("lfs") else facts["blob_id"])
    if version is None or facts.get("size") is None:
        raise DataError(
            "the filesystem says neither version nor time of this file, so a changed one would not be noticed",
            code="remote_file_without_version",
            where=where,
            remedy="copy the files into a folder or a bucket",
        )
    return RemoteFile(size=facts["size"], version=version)


def fetched_home(url: str, cache: DownloadCache) -> Path:
    readable = re.sub(r"[^\w.-]+", "-", url)[-60:].strip("-")
    return cache.folder / "datasets" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
