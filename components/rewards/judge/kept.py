"""Replies of judges on disk, by what was asked of whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from armature.components.artifacts.cache import DownloadCache
from armature.components.artifacts.digests import document_digest
from armature.components.artifacts.disk import collect, write_files
from armature.components.contracts.errors import ConfigurationError


class KeptReplies:
    """Of one address. All runs of this machine share them; they can be deleted at any time.

    Raises:
        ConfigurationError: the folder cannot be written.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._folder = DownloadCache.standard().folder / "judge"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            collect(self._folder)
        except OSError as error:
            raise ConfigurationError(
                f"the cache cannot be written: {error}",
                code="judge_cache_not_writable",
                where=str(self._folder),
                remedy="set ARMATURE_CACHE to a folder",
            ) from error

    def key(self, body: Mapping[str, Any]) -> str:
        return document_digest({"address": self._address, "body": dict(body)})

    def get(self, key: str) -> str | None:
        """The reply, None if it is not there or damaged."""
        try:
            text = json.loads(self._path(key).read_bytes())["reply"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return text if isinstance(text, str) else None

    def keep(self, key: str, reply: str) -> None:
        """Atomically; a disk that is full loses the reply, which has been paid for, and nothing else."""
        path = self._path(key)
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            write_files({path: json.dumps({"reply": reply}).encode()}, beside=self._folder / "reply")

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
