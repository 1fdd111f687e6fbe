"""Files behind an fsspec URL: the one place that speaks fsspec. Requests are repeated, many at a time, and bounded."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from uuid import uuid4

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from pydantic import BaseModel, ValidationError

from armature.components.artifacts.disk import FULL, raising_disk_full, sync
from armature.components.contracts.errors import ArmatureError, ConfigurationError, DataError, StoreError
from armature.components.contracts.installation import install_command

ResultT = TypeVar("ResultT")
DocumentT = TypeVar("DocumentT", bound=BaseModel)

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
"""Seconds before a request is made again."""
CONCURRENT = 32
DOCUMENT_BYTES = 64 * 2**20
"""The largest document that is read as a whole; one that lists 100,000 files has 15 MB."""
LASTING = (
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
"""What does not get better by waiting: a missing bucket, a wrong key, a fetch that its user has stopped."""
PACKAGES = {
    "s3": install_command("s3"),
    **dict.fromkeys(("gs", "gcs"), "pip install gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "pip install adlfs"),
}
"""What installs the client of an address."""
NOT_ASKED = frozenset({"ParamValidationError", "OfflineModeIsEnabled"})
"""Errors of clients that say that a request was never sent, by name."""
MAY_SUCCEED = frozenset({408, 425, 429})
"""Statuses from 400 to 499 that say to ask again; the others are refusals."""
NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "RefreshError"})
"""Errors of clients that are not installed everywhere, by name."""
NO_CALLBACK = fsspec.callbacks.NoOpCallback()


class Source(NamedTuple):
    """The name of a remote file, and the bytes that it has."""

    name: str
    size: int


class WholeFiles(LocalFileSystem):
    """A folder whose files are whole or absent, as an object store's are: each is written beside and then renamed."""

    def put_file(self, path1: Any, path2: Any, callback: Any = None, **kwargs: Any) -> None:
        self._place(path2, partial(shutil.copyfile, path1), exclusive=False)

    def pipe_file(self, path: Any, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
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
    """Unlike a rename, this fails where there is a `target`."""
    try:
        os.link(part, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
            raise
        with target.open("xb") as file:  # a disk without hard links, such as a bucket that is mounted
            file.write(part.read_bytes())


def open_filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL or a folder, and the path in it. Credentials come from the environment.

    "::" is a part of a name here; fsspec itself would take it for a chain of file systems. Raises what the client does.
    """
    protocol = url.partition("://")[0].lower() if "://" in url else "file"
    kind = fsspec.get_filesystem_class(protocol)
    path = str(kind._strip_protocol(url)).rstrip("/")
    return (WholeFiles() if kind is LocalFileSystem else kind(**kind._get_kwargs_from_urls(url))), path


class RemoteFiles:
    """Files below a URL, by their names relative to it. What does not answer is asked again for two minutes, which
    `say` is told; then the error of the client is raised, as is one that waiting does not heal.
    """

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self.url, self._say = url, say
        self._filesystem, self._root = open_filesystem(url)

    def facts(self, folder: str = "") -> dict[str, dict[str, Any]]:
        """What the file system says of all files below `folder`, by their names relative to it."""
        files = self._answered(self._find, folder)
        return dict(zip(self._below(folder, files), files.values(), strict=True))

    def get(self, files: Mapping[Path, Source], callback: fsspec.Callback = NO_CALLBACK) -> None:
        """Copy these to local files, whose folders are made; `callback` hears of every part, and may end it by raising.

        Raises:
            DataError: one is gone or has another size. A larger one ends before it fills the disk.
        """
        for folder in {target.parent for target in files}:
            folder.mkdir(parents=True, exist_ok=True)
        self._all(self._get, [(source, target, callback) for target, source in files.items()])

    def open(self, source: Source, **options: Any) -> IO[bytes]:
        """A file that is read where it lies.

        Raises:
            DataError: it has another size.
        """
        file: IO[bytes] = self._answered(partial(self._filesystem.open, self._path(source.name), "rb", **options))
        if (size := file.seek(0, os.SEEK_END)) != source.size:
            file.close()
            raise _other_size(f"{self.url}/{source.name}", size, source.size)
        file.seek(0)
        return file

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _below(self, folder: str, paths: Iterable[str]) -> list[str]:
        prefix = self._path(folder).rstrip("/").lstrip("/") + "/"
        return [str(path).lstrip("/").removeprefix(prefix).rstrip("/") for path in paths]

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        self._filesystem.invalidate_cache()
        files: dict[str, dict[str, Any]] = self._filesystem.find(self._path(folder).rstrip("/"), detail=True)
        return files

    def _get(self, source: Source, target: Path, callback: fsspec.Callback) -> None:
        where = f"{self.url}/{source.name}"
        try:
            self._filesystem.get_file(
                self._path(source.name), str(target), callback=_AtMost(source.size, where, callback)
            )
        except FileNotFoundError as error:
            raise DataError("the file is gone", code="remote_file_gone", where=where) from error
        if (arrived := target.stat().st_size) != source.size:
            raise _other_size(where, arrived, source.size)

    def _answered(self, request: Callable[..., ResultT], *arguments: Any) -> ResultT:
        answers: list[ResultT] = []
        self._all(lambda: answers.append(request(*arguments)), [()])
        return answers[0]

    def _all(self, request: Callable[..., object], calls: list[tuple[Any, ...]]) -> None:
        """Make every call, those that fail again and again; waits begin again as long as some succeed."""
        waits = iter(WAITS)
        with ThreadPoolExecutor(min(CONCURRENT, max(1, len(calls))), thread_name_prefix="remote") as pool:
            while calls:
                errors = (pool.map if len(calls) > 1 else map)(partial(_error_of, request), calls)
                failures = [(call, error) for call, error in zip(calls, errors, strict=True) if error is not None]
                if not failures:
                    return
                for _, error in failures:
                    if _lasts(error):
                        raise error
                if len(failures) < len(calls):
                    waits = iter(WAITS)
                calls, error = [call for call, _ in failures], failures[0][1]
                if (wait := next(waits, None)) is None:
                    raise error
                self._say(f"{self.url} does not answer, asked again in {wait:.0f} s: {error}")
                time.sleep(wait)


class RemoteFolder(RemoteFiles):
    """The files of a remote store.

    Raises:
        ConfigurationError: `url` is not one, or needs a package that is not installed.
        StoreError: of every method: no such bucket, no permission, no answer.
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
            raise ConfigurationError(
                f"not the address of a remote store: {error}",
                code="invalid_remote_store",
                where=f"machine.remote_store = {url!r}",
                remedy="write it as s3://bucket/prefix, or as a folder",
            ) from error
        local = isinstance(self._filesystem, LocalFileSystem)
        if reason := _unusable(url, local):
            raise ConfigurationError(
                f"not the address of a remote store: {reason}",
                code="invalid_remote_store",
                where=f"machine.remote_store = {url!r}",
                remedy="write it as s3://bucket/prefix, or as the whole path of a folder",
            )
        self.folder = Path(self._root).resolve() if local else None
        """The folder that it is, if it is one of this machine."""

    def read(self, name: str, model: type[DocumentT]) -> DocumentT | None:
        """The JSON document of this name, or None if there is none.

        Raises:
            DataError: it is damaged or too large.
        """
        content = self._answered(self._content, self._path(name))
        try:
            return None if content is None else model.model_validate_json(content)
        except ValidationError as error:
            reason = "too large" if len(content or b"") > DOCUMENT_BYTES else error.errors()[0]["msg"]
            raise DataError(
                f"a document in the remote store cannot be read: {reason}",
                code="remote_record_unreadable",
                where=f"{self.url}/{name}",
                remedy="make what it belongs to again with --force, or delete this file in the remote store",
            ) from error

    def create(self, name: str, document: BaseModel) -> bool:
        """Write a document unless there is one; whether it was written.

        A store without conditional writes overwrites, which is said once.
        """
        path, content = self._path(name), document.model_dump_json().encode()
        created = self._answered(self._created, path, content)
        if created and self._exclusive is None:
            # fsspec's way for stores that have no conditional writes is to look first: another machine comes between.
            atomic = type(self._filesystem).pipe_file is not AbstractFileSystem.pipe_file
            atomic |= isinstance(self._filesystem, AsyncFileSystem)
            self._exclusive = atomic and not self._answered(self._created, path, content)
            if not self._exclusive:
                self._say(
                    f"warning: the remote store {self.url} has no conditional writes: of two machines that make the "
                    "same artifact at the same moment, the later one may replace the other's"
                )
        return created

    def write(self, name: str, document: BaseModel) -> None:
        self._answered(self._filesystem.pipe_file, self._path(name), document.model_dump_json().encode())

    def listed(self, folder: str) -> list[str]:
        """The names right below `folder`."""
        return sorted(self._below(folder, self._answered(self._entries, folder)))

    def put(self, files: Mapping[str, Path]) -> None:
        """Copy local files to these names, one request for each that is not large."""
        with raising_disk_full(Path(self._root)):
            calls = [(str(source), self._path(name)) for name, source in files.items()]
            self._all(self._filesystem.put_file, calls)

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it, if it is there."""
        self._answered(self._delete, self._path(name))

    def _content(self, path: str) -> bytes | None:
        """The bytes of a document; of one that is too large so many that it is not JSON."""
        self._filesystem.invalidate_cache()
        try:
            # Not `exists`, which takes an answer that did not come for a no.
            if self._filesystem.info(path)["size"] > DOCUMENT_BYTES:
                return bytes(DOCUMENT_BYTES + 1)
            content: bytes = self._filesystem.cat_file(path)
        except FileNotFoundError:
            self._see_bucket()
            return None
        return content

    def _see_bucket(self) -> None:
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
                remedy="correct the name, or make the bucket: none is made by itself",
            ) from error
        self._bucket_seen = True

    def _entries(self, folder: str) -> list[str]:
        self._filesystem.invalidate_cache()
        try:
            return list(self._filesystem.ls(self._path(folder), detail=False))
        except FileNotFoundError:
            return []

    def _created(self, target: str, content: bytes) -> bool:
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

    def _all(self, request: Callable[..., object], calls: list[tuple[Any, ...]]) -> None:
        try:
            super()._all(request, calls)
        except ArmatureError:
            raise
        except Exception as error:  # each kind of store raises its own
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> StoreError:
        if isinstance(error, PermissionError) or type(error).__name__ in NO_CREDENTIALS:
            asked = error.__cause__ or error  # that of a client names the request that was refused
            return StoreError(
                f"the remote store cannot be used, these credentials do not allow it: {type(error).__name__}: {asked}",
                code="remote_store_access_denied",
                where=self.url,
                remedy="have an account that may list, read, write and delete there; for s3:// set AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL where it is not Amazon's",
            )
        if _lasts(error):
            return StoreError(
                f"the remote store cannot be used: {type(error).__name__}: {error}",
                code="remote_store_not_usable",
                where=self.url,
                remedy="correct machine.remote_store (and AWS_ENDPOINT_URL, if it is set), or make the bucket: none is "
                "made by itself",
            )
        return StoreError(
            f"the remote store cannot be used, it does not answer: {type(error).__name__}: {error}",
            code="remote_store_unreachable",
            where=self.url,
            remedy="bring it back, or correct its address (for s3://, AWS_ENDPOINT_URL where it is not Amazon's), then "
            "run again: what is finished is kept here and sent then",
        )


class _AtMost(fsspec.Callback):
    """Ends the fetching of a file at the size that it was listed with."""

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
    return DataError(f"{size} bytes arrive of a file that has {listed}", code="remote_file_size_mismatch", where=path)


def _lasts(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    refused = 400 <= status < 500 and status not in MAY_SUCCEED
    return refused or isinstance(error, LASTING) or type(error).__name__ in NOT_ASKED | NO_CREDENTIALS


def _error_of(request: Callable[..., object], call: tuple[Any, ...]) -> Exception | None:
    try:
        request(*call)
    except Exception as error:  # each kind of store raises its own
        return error
    return None


def _unusable(url: str, local: bool) -> str | None:
    """Why nothing can be kept at this address."""
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        return "what is in memory is gone with the process"
    if local and not url.startswith("file:") and not Path(url).expanduser().is_absolute():
        return (
            "it names no bucket"
            if ":" in url.partition("/")[0]
            else "it is neither a URL nor the whole path of a folder"
        )
    if not local and (not rest or rest.startswith("/")):
        return "it names no bucket"
    return None
