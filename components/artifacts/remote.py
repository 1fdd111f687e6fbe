"""A remote copy of the artifact store behind an fsspec URL, such as s3://bucket/prefix."""

from __future__ import annotations

from pathlib import Path

import fsspec

from components.artifacts.digests import folder_digest
from components.artifacts.manifest import MANIFEST, read_manifest
from components.contracts.errors import DataError


class RemoteStore:
    """Object stores cannot rename folders, so the manifest is sent last: without it there is no artifact."""

    def __init__(self, url: str) -> None:
        self.filesystem, self.root = fsspec.core.url_to_fs(url)

    def _home(self, stage: str, fingerprint: str) -> str:
        return f"{self.root.rstrip('/')}/{stage}/{fingerprint}"

    def has(self, stage: str, fingerprint: str) -> bool:
        return bool(self.filesystem.exists(f"{self._home(stage, fingerprint)}/{MANIFEST}"))

    def push(self, stage: str, fingerprint: str, folder: Path) -> None:
        if self.has(stage, fingerprint):
            return
        home = self._home(stage, fingerprint)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for name in sorted(names, key=lambda name: name == MANIFEST):
            self.filesystem.makedirs(f"{home}/{name}".rpartition("/")[0], exist_ok=True)
            self.filesystem.put_file(str(folder / name), f"{home}/{name}")

    def fetch(self, stage: str, fingerprint: str, folder: Path) -> None:
        """
        Raises:
            DataError: what arrived is not what the manifest describes.
        """
        home = self._home(stage, fingerprint)
        for remote in self.filesystem.find(home):
            name = str(remote).removeprefix(home.lstrip("/") if not str(remote).startswith("/") else home)
            target = folder / name.lstrip("/")
            if not target.resolve().is_relative_to(folder.resolve()):
                raise DataError("a file name in the remote store leaves its folder", where=str(remote))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.filesystem.get_file(remote, str(target))
        found = folder_digest(folder, frozenset({MANIFEST}))
        if found != (expected := read_manifest(folder).content):
            raise DataError(
                f"the remote copy is damaged: content {found}, manifest says {expected}",
                where=home,
                remedy="delete the remote folder and run the stage again",
            )
