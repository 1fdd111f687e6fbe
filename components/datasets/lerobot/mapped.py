"""What is written once under the cache and mapped from there: all processes of a machine share its pages."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from armature.components.artifacts.cache import DownloadCache, make_once


class MappedFile(ABC):
    """Pickles as where the file is; it is written again if it is gone."""

    def __init__(self, kind: str, key: str) -> None:
        """
        Args:
            key: all that the file depends on.
        """
        self._target = DownloadCache.standard().folder / kind / hashlib.sha256(key.encode()).hexdigest()[:24]
        self._open(make_once(self._target, self._write))

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open(make_once(self._target, self._write))

    @abstractmethod
    def _write(self, target: Path) -> None: ...

    @abstractmethod
    def _open(self, path: Path) -> None:
        """Map it; what is mapped is left out by `__getstate__`."""
