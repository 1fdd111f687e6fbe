"""Files behind an fsspec URL: requests that are made again, many at a time, and what goes wrong in our words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from armature.components.artifacts.disk import FULL, full_disk_said
from armature.components.contracts.errors import ArmatureError, ConfigurationError, StoreError
from armature.components.installation import install_command

ResultT = TypeVar("ResultT")

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
"""Seconds before a request is made again."""
CONCURRENT = 32
LASTING = (
    PermissionError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    ImportError,
    ValueError,
    TypeError,
)
"""What does not get better by waiting: a missing bucket, a wrong key."""
PACKAGES = {
    "s3": install_command("s3"),
    **dict.fromkeys(("gs", "gcs"), "pip install gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "pip install adlfs"),
}
"""What installs the client of an address."""
NOT_ASKED = frozenset({"ParamValidationError"})
"""Errors of clients that say that a request was wrong before it was sent, by name."""
NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "RefreshError"})
"""Errors of clients that are not installed everywhere, by name."""


_MODIFIED = ("LastModified", "mtime", "last_modified")
"""Where a listing says when a file was changed: that of S3, of Google and of Azure."""


class FileDetails(NamedTuple):
    """`size` in bytes."""

    name: str
    size: int
    modified: datetime


class Upload(NamedTuple):
    """`name` is that of the file that it was begun for."""

    name: str
    id: str
    begun: datetime


class RemoteFolder:
    """Paths are relative to the URL. A store that does not answer is asked again for two minutes; `say` is told.

    Raises:
        ConfigurationError: `url` is not one, or needs a package that is not installed.
        StoreError: of every method: no such bucket, no permission, no answer.
    """

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        scheme, separator, rest = url.partition("://")
        url = f"{scheme.lower()}{separator}{rest}"
        self.url, self._say, self._bucket_seen = url, say, False
        try:
            filesystem, root = fsspec.core.url_to_fs(url)
            # Object stores have no folders to make, and S3's client would make the bucket.
            local = isinstance(filesystem, LocalFileSystem)
            self._filesystem = LocalFileSystem(auto_mkdir=True) if local else filesystem
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
        if reason := _unusable(url, local):
            raise ConfigurationError(
                f"not the address of a remote store: {reason}",
                code="invalid_remote_store",
                where=f"machine.remote_store = {url!r}",
                remedy="write it as s3://bucket/prefix, or as the whole path of a folder",
            )
        self._root = root.rstrip("/")
        self.folder = Path(self._root).resolve() if local else None
        """The folder that it is, if it is one of this machine."""

    @property
    def conditional(self) -> bool:
        """Whether `create` may be atomic: fsspec's own way for stores that have none is to look first."""
        own = type(self._filesystem).pipe_file is not AbstractFileSystem.pipe_file
        return own or isinstance(self._filesystem, LocalFileSystem | AsyncFileSystem)

    def has(self, name: str) -> bool:
        """Whether there is this file; a bucket that is not there is an error, not a no."""
        return self._answered(self._exists, name)

    def those_there(self, names: Iterable[str]) -> set[str]:
        """Which of these files there are."""
        there: set[str] = set()

        def ask(name: str) -> None:
            if self._exists(name):
                there.add(name)

        self._all(ask, [(name,) for name in names])
        return there

    def read(self, name: str) -> bytes:
        content: bytes = self._answered(self._filesystem.cat_file, self._path(name))
        return content

    def read_if_there(self, name: str) -> bytes | None:
        """What is in this file; None where there is none, in a bucket that is there."""
        content: bytes | None = self._answered(self._content, self._path(name))
        return content

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """The content of small files."""
        contents: dict[str, bytes] = {}

        def read(name: str) -> None:
            contents[name] = self._filesystem.cat_file(self._path(name))

        self._all(read, [(name,) for name in names])
        return contents

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless there is one; whether it was written. A store without conditional writes overwrites."""
        return self._answered(self._created, self._path(name), content)

    def listed(self, folder: str) -> list[str]:
        """The names right below `folder`."""
        return sorted(self._below(folder, self._answered(self._entries, folder)))

    def found(self, folder: str) -> list[str]:
        """The files below `folder`, relative to it."""
        return sorted(self._below(folder, self._answered(self._filesystem.find, self._path(folder))))

    def details(self, folder: str) -> list[FileDetails]:
        """All files below `folder`, or the file of this name."""
        found = self._answered(self._find, folder)
        names = self._below("", found)
        return [self._detail(name, info) for name, info in zip(names, found.values(), strict=True)]

    def uploads(self) -> list[Upload]:
        """Uploads in parts that were begun and not completed, which S3 keeps, and charges for, without showing them."""
        if not hasattr(self._filesystem, "list_multipart_uploads"):
            return []
        bucket, _, prefix = self._path("").partition("/")
        found = self._answered(self._filesystem.list_multipart_uploads, bucket)
        uploads = (Upload(each["Key"], each["UploadId"], each["Initiated"]) for each in found)
        return [
            upload._replace(name=upload.name.removeprefix(prefix))
            for upload in uploads
            if upload.name.startswith(prefix)
        ]

    def abort(self, upload: Upload) -> None:
        bucket, _, key = self._path(upload.name).partition("/")
        self._answered(self._filesystem.abort_mpu, bucket, key, upload.id)

    def put(self, files: Mapping[str, Path]) -> None:
        """Copy local files to these names, one request for each that is not large."""
        with full_disk_said(Path(self._root)):
            self._all(self._put, [(str(source), self._path(name)) for name, source in files.items()])

    def get(self, files: Mapping[str, Path]) -> None:
        """Copy these to local files, whose folders are made."""
        for folder in {target.parent for target in files.values()}:
            folder.mkdir(parents=True, exist_ok=True)
        self._all(self._filesystem.get_file, [(self._path(name), str(target)) for name, target in files.items()])

    def write(self, name: str, content: bytes) -> None:
        self._answered(self._pipe, self._path(name), content)

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it, if it is there."""
        self._answered(self._delete, self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _below(self, folder: str, paths: Iterable[str]) -> list[str]:
        prefix = self._path(folder).rstrip("/").lstrip("/") + "/"
        return [str(path).lstrip("/").removeprefix(prefix).rstrip("/") for path in paths]

    def _exists(self, name: str) -> bool:
        # Not `exists`, which takes an answer that did not come for a no.
        self._filesystem.invalidate_cache()
        try:
            self._filesystem.info(self._path(name))
        except FileNotFoundError:
            self._see_bucket()
            return False
        return True

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

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        self._filesystem.invalidate_cache()
        found: dict[str, dict[str, Any]] = self._filesystem.find(self._path(folder).rstrip("/"), detail=True)
        return found

    def _detail(self, name: str, info: Mapping[str, Any]) -> FileDetails:
        said = (info[key] for key in _MODIFIED if isinstance(info.get(key), datetime))
        modified = next(said, None) or self._answered(self._filesystem.modified, info["name"])
        return FileDetails(name, info["size"], modified)

    def _put(self, source: str, target: str) -> None:
        self._filesystem.put_file(source, target)

    def _content(self, path: str) -> bytes | None:
        try:
            content: bytes = self._filesystem.cat_file(path)
        except FileNotFoundError:
            self._see_bucket()
            return None
        return content

    def _created(self, target: str, content: bytes) -> bool:
        try:
            if isinstance(self._filesystem, LocalFileSystem):
                with self._filesystem.open(target, "xb") as file:
                    file.write(content)
            else:
                self._filesystem.pipe_file(target, content, mode="create")
        except FileExistsError:
            return False
        return True

    def _pipe(self, target: str, content: bytes) -> None:
        self._filesystem.pipe_file(target, content)

    def _delete(self, path: str) -> None:
        self._filesystem.invalidate_cache()
        try:
            self._filesystem.rm(path, recursive=True)
        except FileNotFoundError:
            return

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
                    self._refuse_lasting(error)
                if len(failures) < len(calls):
                    waits = iter(WAITS)
                calls, error = [call for call, _ in failures], failures[0][1]
                if (wait := next(waits, None)) is None:
                    raise StoreError(
                        f"the remote store cannot be used, it does not answer: {type(error).__name__}: {error}",
                        code="remote_store_unreachable",
                        where=self.url,
                        remedy="bring it back, or correct its address (for s3://, AWS_ENDPOINT_URL where it is not "
                        "Amazon's), then run again: what is finished is kept here and copied then",
                    ) from error
                self._say(f"the remote store {self.url} does not answer, asked again in {wait:.0f} s: {error}")
                time.sleep(wait)

    def _refuse_lasting(self, error: Exception) -> None:
        if isinstance(error, ArmatureError) or (isinstance(error, OSError) and error.errno in FULL):
            raise error
        if isinstance(error, PermissionError) or type(error).__name__ in NO_CREDENTIALS:
            asked = error.__cause__ or error  # that of a client names the request that was refused
            raise StoreError(
                f"the remote store cannot be used, these credentials do not allow it: {type(error).__name__}: {asked}",
                code="remote_store_access_denied",
                where=self.url,
                remedy="have an account that may list, read, write and delete there; for s3:// set AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL where it is not Amazon's",
            ) from error
        if isinstance(error, LASTING) or type(error).__name__ in NOT_ASKED:
            raise StoreError(
                f"the remote store cannot be used: {type(error).__name__}: {error}",
                code="remote_store_not_usable",
                where=self.url,
                remedy="correct machine.remote_store (and AWS_ENDPOINT_URL, if it is set), or make the bucket: none is "
                "made by itself",
            ) from error


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
