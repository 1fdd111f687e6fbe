"""Files behind an fsspec URL; the only module that calls fsspec.

Requests run many at a time and are retried a limited number of times. Sizes are checked while data arrives.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, TypeVar
from uuid import uuid4

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from armature.components.artifacts.disk import FULL, raising_disk_full, sync
from armature.components.contracts.errors import ArmatureError, ConfigurationError, DataError, StoreError
from armature.components.contracts.installation import install_command

ResultT = TypeVar("ResultT")
DocumentT = TypeVar("DocumentT", bound=BaseModel)

RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
"""Seconds to wait before each retry of a failed request, one number per retry."""
CONCURRENT = 32
"""Largest number of requests that are made at the same time."""
DOCUMENT_BYTES = 64 * 2**20
"""Largest size in bytes of a JSON document that is read. A document that lists 100,000 files has 15 MB."""
NOT_RETRIED = (
    ArmatureError,
    InterruptedError,
    PermissionError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    ImportError,
    ValueError,
    TypeError,
)
"""Error classes for which a request is not retried, since waiting does not help: a missing bucket, a wrong key, or a
fetch that its user stopped."""
PACKAGES = {
    "s3": install_command("s3"),
    **dict.fromkeys(("gs", "gcs"), "pip install gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "pip install adlfs"),
}
"""Command that installs the client package for a URL scheme, by scheme."""
NOT_SENT = frozenset({"ParamValidationError", "OfflineModeIsEnabled"})
"""Names of client error classes that mean the request was never sent."""
RETRIED_STATUSES = frozenset({408, 425, 429})
"""HTTP statuses from 400 to 499 that are retried; all others are refusals."""
NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "RefreshError"})
"""Names of error classes about missing or wrong credentials. Names are used since the clients may not be installed."""
NO_CALLBACK = fsspec.callbacks.NoOpCallback()


Files = dict[str, tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")], NonNegativeInt]]
"""MD5 and size in bytes of each file, by relative path."""


class Source(NamedTuple):
    """Name and size in bytes of a remote file."""

    name: str
    size: int


class WholeFiles(LocalFileSystem):
    """A local folder that behaves like an object store: each file is written under a temporary name and then
    renamed."""

    def put_file(self, path1: Any, path2: Any, callback: Any = None, **kwargs: Any) -> None:
        """Copy a local file to `path2`."""
        self._place(path2, partial(shutil.copyfile, path1), exclusive=False)

    def pipe_file(self, path: Any, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write bytes to a file; with mode `create`, fail if the file exists."""
        self._place(path, lambda part: part.write_bytes(value), exclusive=mode == "create")

    def _place(self, path: Any, write: Callable[[Path], object], exclusive: bool) -> None:
        target = Path(self._strip_protocol(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{uuid4().hex}.part")
        try:
            write(part)
            sync(part)
            if exclusive:
                _link(part, target)
            else:
                part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def _link(part: Path, target: Path) -> None:
    """Rename `part` to `target`, but raise FileExistsError if `target` exists."""
    try:
        os.link(part, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
            raise
        with target.open("xb") as file:  # a disk without hard links, such as a mounted bucket
            file.write(part.read_bytes())


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL or local folder, and the path within it. Credentials come from the
    environment.

    "::" is an ordinary part of a name here, although fsspec itself would read it as a chain of file systems. Errors of
    the client are raised unchanged.
    """
    protocol = url.partition("://")[0].lower() if "://" in url else "file"
    kind = fsspec.get_filesystem_class(protocol)
    path = str(kind._strip_protocol(url)).rstrip("/")
    return (WholeFiles() if kind is LocalFileSystem else kind(**kind._get_kwargs_from_urls(url))), path


class RemoteFiles:
    """Files below a URL, by their relative names.

    A failed request is retried for two minutes, with a message to `say` each time. After that, or at once if waiting
    cannot help, the client's error is raised.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> _ = Path(folder, "a.txt").write_text("hello")
        >>> RemoteFiles(folder, say=print).facts()["a.txt"]["size"]
        5
    """

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self.url, self._say = url, say
        self._filesystem, self._root = open_filesystem(url)

    def facts(self, folder: str = "") -> dict[str, dict[str, Any]]:
        """Return what the file system reports about each file below `folder`, by relative name."""
        files = self._request(self._find, folder)
        return dict(zip(self._relative_names(folder, files), files.values(), strict=True))

    def get(self, files: Mapping[Path, Source], callback: fsspec.Callback = NO_CALLBACK) -> None:
        """Copy remote files to local paths, creating their folders.

        Args:
            files: remote file by local path.
            callback: is called for every part that arrives, and may end the copying by raising an exception.

        Raises:
            DataError: a file is gone or has another size. Copying a file that is too large ends before it fills the
                disk.
        """
        for folder in {target.parent for target in files}:
            folder.mkdir(parents=True, exist_ok=True)
        self._request_all(self._get, [(source, target, callback) for target, source in files.items()])

    def open(self, source: Source, **options: Any) -> IO[bytes]:
        """Open a remote file for reading in place.

        Raises:
            DataError: the file has another size.
        """
        file: IO[bytes] = self._request(partial(self._filesystem.open, self._path(source.name), "rb", **options))
        if (size := file.seek(0, os.SEEK_END)) != source.size:
            file.close()
            raise _other_size(f"{self.url}/{source.name}", size, source.size)
        file.seek(0)
        return file

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _relative_names(self, folder: str, paths: Iterable[str]) -> list[str]:
        """Return paths relative to `folder`."""
        prefix = self._path(folder).rstrip("/").lstrip("/") + "/"
        return [str(path).lstrip("/").removeprefix(prefix).rstrip("/") for path in paths]

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return the file system's report about each file below `folder`, by path."""
        self._filesystem.invalidate_cache()
        files: dict[str, dict[str, Any]] = self._filesystem.find(self._path(folder).rstrip("/"), detail=True)
        return files

    def _get(self, source: Source, target: Path, callback: fsspec.Callback) -> None:
        """Copy one remote file and check its size."""
        where = f"{self.url}/{source.name}"
        try:
            self._filesystem.get_file(
                self._path(source.name), str(target), callback=_AtMost(source.size, where, callback)
            )
        except FileNotFoundError as error:
            raise DataError("the file is gone", code="remote_file_gone", where=where) from error
        if (arrived := target.stat().st_size) != source.size:
            raise _other_size(where, arrived, source.size)

    def _request(self, request: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Make one request with retries and return its result."""
        answers: list[ResultT] = []
        self._request_all(lambda: answers.append(request(*arguments)), [()])
        return answers[0]

    def _request_all(self, request: Callable[..., object], calls: list[tuple[Any, ...]]) -> None:
        """Make every request, and repeat those that fail. As long as some of the repeated requests succeed, the next
        wait is the shortest one again."""
        waits = iter(RETRY_WAITS_S)
        with ThreadPoolExecutor(min(CONCURRENT, max(1, len(calls))), thread_name_prefix="remote") as pool:
            while calls:
                errors = (pool.map if len(calls) > 1 else map)(partial(_error_raised, request), calls)
                failures = [(call, error) for call, error in zip(calls, errors, strict=True) if error is not None]
                if not failures:
                    return
                for _, error in failures:
                    if _is_permanent(error):
                        raise error
                if len(failures) < len(calls):
                    waits = iter(RETRY_WAITS_S)
                calls, error = [call for call, _ in failures], failures[0][1]
                if (wait := next(waits, None)) is None:
                    raise error
                self._say(f"{self.url} does not answer, next try in {wait:.0f} s: {error}")
                time.sleep(wait)


class RemoteFolder(RemoteFiles):
    """The files of a remote store, as JSON documents and data files.

    Raises:
        ConfigurationError: `url` is not an address, or needs a package that is not installed.
        StoreError: raised by every method: the bucket is missing, access is denied, or there is no answer.
    """

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        scheme, separator, rest = url.partition("://")
        url = f"{scheme.lower()}{separator}{rest}"
        self._bucket_seen = False
        self._exclusive: bool | None = None
        try:
            super().__init__(url, say)
        except ImportError as error:
            raise ConfigurationError(
                f"the remote store needs a package that is not installed: {error}",
                code="package_missing",
                where=f"machine.remote_store = {url!r}",
                remedy=PACKAGES.get(url.partition("://")[0], "install it beside armature"),
            ) from error
        except (ValueError, TypeError, OSError) as error:
            raise _invalid_address(url, error) from error
        local = isinstance(self._filesystem, LocalFileSystem)
        if reason := _reason_unusable(url, local):
            raise _invalid_address(url, reason)
        self.folder = Path(self._root).resolve() if local else None
        """The local folder, if the remote store is one."""

    def read(self, name: str, model: type[DocumentT]) -> DocumentT | None:
        """Return the JSON document of this name, None if it does not exist.

        Raises:
            DataError: the document is damaged or too large.
        """
        content = self._request(self._read_document, self._path(name))
        try:
            return None if content is None else model.model_validate_json(content)
        except ValidationError as error:
            reason = "too large" if len(content or b"") > DOCUMENT_BYTES else error.errors()[0]["msg"]
            raise DataError(
                f"a document in the remote store cannot be read: {reason}",
                code="remote_record_unreadable",
                where=f"{self.url}/{name}",
                remedy="make the artifact again with --force, or delete this file in the remote store",
            ) from error

    def create(self, name: str, document: BaseModel) -> bool:
        """Write a document unless one of this name exists. Return True if it was written.

        A store without conditional writes may overwrite a document of another machine; a warning says so once.
        """
        path, content = self._path(name), document.model_dump_json().encode()
        created = self._request(self._create_file, path, content)
        if created and self._exclusive is None:
            # For stores without conditional writes, fsspec first looks whether the file exists; another machine may
            # write it in between.
            atomic = type(self._filesystem).pipe_file is not AbstractFileSystem.pipe_file
            atomic |= isinstance(self._filesystem, AsyncFileSystem)
            self._exclusive = atomic and not self._request(self._create_file, path, content)
            if not self._exclusive:
                self._say(
                    f"warning: the remote store {self.url} has no conditional writes: of two machines that make the "
                    "same artifact at the same moment, the later one may replace the other's"
                )
        return created

    def write(self, name: str, document: BaseModel) -> None:
        """Write a document, replacing an existing one."""
        self._request(self._filesystem.pipe_file, self._path(name), document.model_dump_json().encode())

    def listed(self, folder: str) -> list[str]:
        """Return the sorted names of files and folders directly below `folder`."""
        return sorted(self._relative_names(folder, self._request(self._entries, folder)))

    def put(self, folder: str, files: Mapping[str, Path]) -> Collection[str]:
        """Copy local files to these names in `folder`, except where a file of the same size exists.

        Files that are not large take one request each.

        Returns:
            The names of all files that were in the folder before.
        """
        there = self.facts(folder)
        missing = {name: path for name, path in files.items() if there.get(name, {}).get("size") != path.stat().st_size}
        with raising_disk_full(Path(self._root)):
            calls = [(str(source), self._path(f"{folder}/{name}")) for name, source in missing.items()]
            self._request_all(self._filesystem.put_file, calls)
        return there.keys()

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with everything in it. Do nothing if it does not exist."""
        self._request(self._delete, self._path(name))

    def _read_document(self, path: str) -> bytes | None:
        """Return the bytes of a document, None if it does not exist. A document that is too large is replaced by zeros,
        which are not JSON."""
        self._filesystem.invalidate_cache()
        try:
            # `exists` would return False for a request that failed.
            if self._filesystem.info(path)["size"] > DOCUMENT_BYTES:
                return bytes(DOCUMENT_BYTES + 1)
            content: bytes = self._filesystem.cat_file(path)
        except FileNotFoundError:
            self._check_bucket()
            return None
        return content

    def _check_bucket(self) -> None:
        """Raise a StoreError if the bucket does not exist."""
        bucket = self._root.partition("/")[0]
        if not bucket or self._bucket_seen:
            return
        try:
            self._filesystem.info(bucket)
        except FileNotFoundError as error:
            raise StoreError(
                f"the remote store cannot be used: there is no bucket {bucket!r}",
                code="bucket_missing",
                where=f"machine.remote_store = {self.url!r}",
                remedy="correct the name, or create the bucket: this is not done automatically",
            ) from error
        self._bucket_seen = True

    def _entries(self, folder: str) -> list[str]:
        """Return the paths directly below `folder`."""
        self._filesystem.invalidate_cache()
        try:
            return list(self._filesystem.ls(self._path(folder), detail=False))
        except FileNotFoundError:
            return []

    def _create_file(self, target: str, content: bytes) -> bool:
        """Create a file exclusively. Return False if it exists already."""
        try:
            self._filesystem.pipe_file(target, content, mode="create")
        except FileExistsError:
            return False
        return True

    def _delete(self, path: str) -> None:
        self._filesystem.invalidate_cache()
        try:
            self._filesystem.rm(path, recursive=True)
        except FileNotFoundError:
            return

    def _request_all(self, request: Callable[..., object], calls: list[tuple[Any, ...]]) -> None:
        """Make every request with the same retries as `RemoteFiles`. Errors of the client are raised as StoreErrors."""
        try:
            super()._request_all(request, calls)
        except ArmatureError:
            raise
        except Exception as error:  # each kind of store raises its own errors
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            raise self._store_error(error) from error

    def _store_error(self, error: Exception) -> StoreError:
        """Return the StoreError for an error of the client."""
        if isinstance(error, PermissionError) or type(error).__name__ in NO_CREDENTIALS:
            detail = error.__cause__ or error  # the client's own error names the refused request
            return StoreError(
                f"the remote store cannot be used with these credentials: {type(error).__name__}: {detail}",
                code="remote_store_access_denied",
                where=self.url,
                remedy="use an account that may list, read, write and delete there; for s3:// set AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL where it is not Amazon's",
            )
        if _is_permanent(error):
            return StoreError(
                f"the remote store cannot be used: {type(error).__name__}: {error}",
                code="remote_store_not_usable",
                where=self.url,
                remedy="correct machine.remote_store (and AWS_ENDPOINT_URL, if it is set), or create the "
                "bucket: this is not done automatically",
            )
        return StoreError(
            f"the remote store cannot be used, it does not answer: {type(error).__name__}: {error}",
            code="remote_store_unreachable",
            where=self.url,
            remedy="restore it, or correct its address (for s3://, AWS_ENDPOINT_URL where it is not Amazon's), then "
            "run again: finished artifacts are kept locally and sent then",
        )


class _AtMost(fsspec.Callback):
    """Progress callback that raises an error as soon as a file exceeds its listed size."""

    def __init__(self, size: int, path: str, callback: fsspec.Callback) -> None:
        super().__init__()
        self.value = 0
        self._most, self._path, self._callback = size, path, callback

    def set_size(self, size: int) -> None:
        self._callback.set_size(size)

    def relative_update(self, inc: int = 1) -> None:
        self.absolute_update(self.value + inc)

    def absolute_update(self, value: int) -> None:
        grown, self.value = value - self.value, value
        if value > self._most:
            raise _other_size(self._path, value, self._most)
        self._callback.relative_update(grown)


def _other_size(path: str, size: int, listed: int) -> DataError:
    return DataError(
        f"{size} bytes arrived of a file with {listed} bytes", code="remote_file_size_mismatch", where=path
    )


def _is_permanent(error: Exception) -> bool:
    """Check that an error is one that would occur again at a retry."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    refused = 400 <= status < 500 and status not in RETRIED_STATUSES
    return refused or isinstance(error, NOT_RETRIED) or type(error).__name__ in NOT_SENT | NO_CREDENTIALS


def _error_raised(request: Callable[..., object], call: tuple[Any, ...]) -> Exception | None:
    """Call `request`. Return the error that it raises, or None."""
    try:
        request(*call)
    except Exception as error:  # each kind of store raises its own errors
        return error
    return None


def _invalid_address(url: str, reason: object) -> ConfigurationError:
    return ConfigurationError(
        f"not the address of a remote store: {reason}",
        code="invalid_remote_store",
        where=f"machine.remote_store = {url!r}",
        remedy="write it as s3://bucket/prefix, or as the absolute path of a folder",
    )


def _reason_unusable(url: str, local: bool) -> str | None:
    """Return the reason why a remote store cannot be kept at this address, or None."""
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        return "data in memory is lost when the process ends"
    if local and not url.startswith("file:") and not Path(url).expanduser().is_absolute():
        return (
            "it names no bucket"
            if ":" in url.partition("/")[0]
            else "it is neither a URL nor the absolute path of a folder"
        )
    if not local and (not rest or rest.startswith("/")):
        return "it names no bucket"
    return None
