"""Files of tables and datasets behind a URL. A file is fetched when it is first used, and kept in the cache."""

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
"""Options with which fsspec reads parts of a file: in blocks of 1 MiB, the last 8 of which are kept in memory."""
VERSIONS = ("ETag", "etag", "sha256", "md5", "mtime", "LastModified", "last_modified", "created")
"""Names of the values, in what a file system reports about a file, that change with the file's content. The best name
comes first."""


class RemoteFile(BaseModel):
    """Size in bytes of a remote file, and a version that changes with its content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: NonNegativeInt
    version: str


class FileListing(BaseModel):
    """All files of a remote dataset, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: dict[str, RemoteFile]


@dataclass(frozen=True)
class FetchedFiles:
    """The files below a URL, fetched into a local folder when first used.

    Attributes:
        url: address of the dataset.
        listing: files as listed when the dataset was opened. Fetched files are compared with it.
        root: local folder of the fetched files.
        limit_bytes: largest number of bytes that the dataset may fetch.
        ranges: fetch only files in meta/, and read data and videos remotely by byte ranges.
    """

    url: str
    listing: FileListing
    root: Path
    limit_bytes: int
    ranges: bool = False

    @classmethod
    def opened(cls, url: str, listing: FileListing, cache: DownloadCache) -> Self:
        """Return the files below `url` that `listing` lists. The name of the local folder depends on the listed
        versions, so files of a changed bucket are not mixed with older ones."""
        content = listing_digest({name: entry.version for name, entry in listing.files.items()})
        return cls(url, listing, fetched_home(url, cache) / content[:16], cache.limit_bytes, cache.ranges)

    def __str__(self) -> str:
        return self.url

    def names(self, part: str = "") -> list[str]:
        """Sorted names of all files that begin with `part`."""
        return sorted(name for name in self.listing.files if name.startswith(part))

    def has(self, name: str | PurePosixPath) -> bool:
        """True if the dataset has a file of this name."""
        return str(name) in self.listing.files

    def digest(self) -> str:
        """Digest of the names, sizes and versions of all files."""
        files = self.listing.files
        return listing_digest({name: f"{files[name].size} {files[name].version}" for name in self.names()})

    def quick_digest(self) -> str:
        """Return `digest()`, which is quick here because no file has to be read for it."""
        return self.digest()

    def path(self, name: str | PurePosixPath) -> Path:
        """Return the local path of a file, after fetching it if necessary.

        Raises:
            DataError: there is no such file, it cannot be fetched, or the dataset would exceed its limit.
        """
        return self.fetch(name)

    def fetch(self, name: str | PurePosixPath, callback: fsspec.Callback = NO_CALLBACK) -> Path:
        """Return the local path of a file, after fetching it if necessary. Progress is reported to `callback`.

        Args:
            callback: is called for every part that arrives; an exception that it raises ends the fetching.

        Raises:
            DataError: see `path`.
        """
        target, entry = self.root / name, self._entry(name)
        if target.is_file():
            return target
        with self._reserved(str(name), entry):
            return make_once(target, partial(self._fetch, str(name), entry, callback))

    @contextmanager
    def view(self, name: str | PurePosixPath, whole: bool) -> Iterator[Path | IO[bytes]]:
        """Yield a file for reading: a local path, or an open remote file if only a part will be read or `ranges` is
        set.

        Args:
            whole: True if the whole file will be read.

        Raises:
            DataError: see `path`; or the remote file cannot be read.
        """
        target, entry = self.root / name, self._entry(name)
        if target.is_file() or (whole and not self.ranges):
            yield self.path(name)
            return
        try:
            options = BLOCKS if whole else {"cache_type": "none"}
            file = _open_url(self.url).open(Source(str(name), entry.size), **options)
        except DataError:
            raise
        except Exception as error:  # each kind of file system raises its own errors
            raise DataError(
                f"{str(name)!r} cannot be read: {error!r:.300}", code="remote_file_unreadable", where=self.url
            ) from error
        with file:
            yield file

    def version(self, name: str | PurePosixPath) -> str:
        """Return a text that changes whenever the content of this file changes."""
        return f"{self.url}\0{name}\0{self._entry(name)}"

    def _entry(self, name: str | PurePosixPath) -> RemoteFile:
        """Return size and version of a file from the listing. Raise a DataError if the dataset has no such file."""
        entry = self.listing.files.get(str(name))
        if entry is None:
            raise DataError(f"the dataset has no file {str(name)!r}", code="remote_file_missing", where=self.url)
        return entry

    @cached_property
    def _all_bytes(self) -> int:
        return sum(entry.size for entry in self.listing.files.values())

    @contextmanager
    def _reserved(self, name: str, entry: RemoteFile) -> Iterator[None]:
        """Count the bytes of a file toward the dataset's limit while the block fetches the file. Files that other
        processes are fetching count, too.

        Raises:
            DataError: the dataset would exceed its limit.
        """
        if self._all_bytes <= self.limit_bytes:  # no file can exceed the limit, so skip the slow counting
            yield
            return
        folder = self.root / ".arriving"
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as reserved:
            with _locked(folder / "counting"):
                arriving = {mark.name for mark in folder.iterdir() if _is_locked(mark)}
                files = self.listing.files.items()
                here = {key for key, _ in files if _lock_name(key) in arriving or (self.root / key).is_file()}
                fetched = sum(each.size for key, each in files if key in here)
                if name not in here and fetched + entry.size > self.limit_bytes:
                    raise DataError(
                        f"{name!r} has {entry.size / 1e9:.3g} GB; with the {fetched / 1e9:.3g} GB fetched before, "
                        f"this exceeds the {self.limit_bytes / 1e9:.3g} GB that one dataset may fetch",
                        code="fetch_limit_exceeded",
                        where=self.url,
                        remedy="choose fewer episodes or cameras, raise ARMATURE_FETCH_LIMIT_GB, or read the files "
                        "remotely: ARMATURE_FETCH=ranges",
                    )
                if name not in here:
                    reserved.enter_context(_locked(folder / _lock_name(name)))
            yield

    def _fetch(self, name: str, entry: RemoteFile, callback: fsspec.Callback, target: Path) -> None:
        """Fetch a file into `target`."""
        try:
            _open_url(self.url).get({target: Source(name, entry.size)}, callback)
        except DataError:
            raise
        except Exception as error:  # each kind of file system raises its own errors
            raise DataError(
                f"{name!r} cannot be fetched: {error!r:.300}", code="remote_file_not_fetched", where=self.url
            ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file during the block."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_locked(path: Path) -> bool:
    """True if another process holds the lock of a file."""
    with path.open() as file:
        return not try_lock(file)


def _lock_name(name: str) -> str:
    """Return the name of the lock file that exists while the remote file `name` is being fetched."""
    return hashlib.sha256(name.encode()).hexdigest()


def listing_digest(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 over all file names, each with the digest or version of its file."""
    listing = "".join(f"{name}\0{digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(os.fsencode(listing)).hexdigest()


def list_files(url: str, wanted: Callable[[str], bool]) -> FileListing:
    """List the files below `url` whose names `wanted` accepts.

    Raises:
        ConfigurationError: a package that the protocol needs is not installed.
        DataError: the URL cannot be reached.
    """
    remote = _open_url(url)
    try:
        listed = remote.facts()
    except Exception as error:  # each kind of file system raises its own errors
        raise DataError(
            f"the dataset cannot be reached: {str(error).splitlines()[0] if str(error) else repr(error)}",
            code="dataset_unreachable",
            where=url,
            remedy="check the name, the revision and the network, log in for a gated dataset, or use a local folder",
        ) from error
    files = {}
    for name, facts in listed.items():
        if wanted(name) and facts.get("type", "file") == "file":  # a local folder may contain pipes and devices
            files[str(confined(name, url))] = _remote_file(facts, f"{url}/{name}")
    return FileListing(files=files)


def _open_url(url: str) -> RemoteFiles:
    """Open the file system of a URL.

    Raises:
        ConfigurationError: a package that the protocol needs is not installed, or the server cannot be reached.
    """
    try:
        return RemoteFiles(url, tqdm.write)
    except Exception as error:  # each kind of file system raises its own errors, and some connect already here
        remedy = f"{install_command('s3')} for s3://, or what fsspec names for another protocol"
        raise ConfigurationError(
            f"the URL cannot be opened: {error}", code="url_not_supported", where=url, remedy=remedy
        ) from error


def _remote_file(facts: Mapping[str, Any], where: str) -> RemoteFile:
    """Read size and version from what a file system reports about a file. A model hub reports a digest of the content.

    Raises:
        DataError: nothing reported changes with the content, so an outdated local copy would not be noticed.
    """
    version = next((str(facts[key]) for key in VERSIONS if facts.get(key) is not None), None)
    if facts.get("blob_id"):
        version = str(facts["lfs"]["sha256"] if facts.get("lfs") else facts["blob_id"])
    if version is None or facts.get("size") is None:
        raise DataError(
            "the file system reports neither a version nor a time of this file, so a change would not be noticed",
            code="remote_file_without_version",
            where=where,
            remedy="copy the files into a local folder or a bucket",
        )
    return RemoteFile(size=facts["size"], version=version)


def fetched_home(url: str, cache: DownloadCache) -> Path:
    """Return the local folder for the files fetched from `url`. A person can recognize the URL in the folder's name."""
    readable = re.sub(r"[^\w.-]+", "-", url)[-60:].strip("-")
    return cache.folder / "datasets" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
