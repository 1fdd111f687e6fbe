"""A remote copy of the artifact store behind an fsspec URL, such as s3://bucket/prefix."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from components.artifacts.disk import FULL, full_disk_said
from components.artifacts.manifest import MANIFEST
from components.contracts.errors import ArmatureError, ConfigurationError, DataError, StoreError
from components.installation import install_command

ResultT = TypeVar("ResultT")

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a request is tried again."""
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


class RemoteStore:
    """Object stores cannot rename folders, so the manifest is sent last: without it there is no artifact.

    A store that does not answer is asked again for half a minute; `say` is told of each attempt.

    Raises:
        ConfigurationError: `url` is not one, or needs a package that is not installed.
    """

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self.url, self._say = url, say
        try:
            self.filesystem, self.root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ConfigurationError(
                f"the remote store needs a package that is not installed: {error}",
                where=f"machine.remote_store = {url!r}",
                remedy=f"for s3://: {install_command('s3')}",
            ) from error
        except (ValueError, TypeError, OSError) as error:
            raise ConfigurationError(
                f"not the address of a remote store: {error}",
                where=f"machine.remote_store = {url!r}",
                remedy="write it as s3://bucket/prefix, or as a folder",
            ) from error

    def has(self, stage: str, fingerprint: str) -> bool:
        return self._answered(self._exists, f"{self._home(stage, fingerprint)}/{MANIFEST}")

    def push(self, stage: str, fingerprint: str, folder: Path) -> None:
        """Copy a finished artifact, unless it is there.

        Raises:
            StoreError: the remote store does not take it; what arrived of it is not seen as an artifact.
        """
        if self.has(stage, fingerprint):
            return
        home = self._home(stage, fingerprint)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        with full_disk_said(Path(home)):
            for name in sorted(names, key=lambda name: name == MANIFEST):
                self._answered(self._put, folder / name, f"{home}/{name}")

    def fetch(self, stage: str, fingerprint: str, folder: Path) -> None:
        """
        Raises:
            DataError: a name leaves the folder.
            StoreError: the remote store does not give it.
        """
        home = self._home(stage, fingerprint)
        for remote in self._answered(self.filesystem.find, home):
            name = str(remote).removeprefix(home.lstrip("/") if not str(remote).startswith("/") else home)
            target = folder / name.lstrip("/")
            if not target.resolve().is_relative_to(folder.resolve()):
                raise DataError("a file name in the remote store leaves its folder", where=str(remote))
            target.parent.mkdir(parents=True, exist_ok=True)
            self._answered(self.filesystem.get_file, remote, str(target))

    def remove(self, fingerprint: str) -> None:
        """Delete the artifacts of this fingerprint and of its units, the manifests first."""
        homes = self._answered(self.filesystem.glob, f"{self.root.rstrip('/')}/*/{fingerprint}*")
        for home in homes:
            for name in (f"{home}/{MANIFEST}", home):
                if self._answered(self._exists, name):
                    self._answered(self.filesystem.rm, name, True)

    def _home(self, stage: str, fingerprint: str) -> str:
        return f"{self.root.rstrip('/')}/{stage}/{fingerprint}"

    def _exists(self, path: str) -> bool:
        # Not `exists`, which takes an answer that did not come for a no.
        self.filesystem.invalidate_cache()
        try:
            self.filesystem.info(path)
        except FileNotFoundError:
            return False
        return True

    def _put(self, source: Path, target: str) -> None:
        self.filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.filesystem.put_file(str(source), target)

    def _answered(self, request: Callable[..., ResultT], *arguments: Any) -> ResultT:
        for wait in (*WAITS, None):
            try:
                return request(*arguments)
            except ArmatureError:
                raise
            except Exception as error:  # each kind of store raises its own
                if isinstance(error, OSError) and error.errno in FULL:
                    raise
                if wait is None or isinstance(error, LASTING):
                    raise StoreError(
                        f"the remote store cannot be used: {type(error).__name__}: {error}",
                        where=self.url,
                        remedy="bring it back, then run again: what is finished is kept here and copied then",
                    ) from error
                self._say(f"the remote store {self.url} does not answer, asked again in {wait:.0f} s: {error}")
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")
