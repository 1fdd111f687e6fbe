"""Artifacts of a few small files, for tests of the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from armature.components.artifacts.manifest import write_manifest


def fill_with(files: Mapping[str, bytes] = MappingProxyType({}), kind: str = "stage") -> Callable[[Path], None]:
    """Return a function that writes these files, by relative path, and their manifest into a folder."""

    def fill(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        write_manifest(folder, kind=kind, kind_version=1, rows={}, drops={}, inputs={}, settings={"a": 1})

    return fill
