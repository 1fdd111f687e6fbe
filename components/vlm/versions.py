"""The folders of a series of versions of the weights: which are kept, and what changed from one to the next."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from armature.components.artifacts.disk import replaced_folder
from armature.components.artifacts.tensors import saving
from armature.components.inference.served.armature_served.deltas import HostWeights, write_delta
from armature.components.training.ranks import Ranks

KEEP_VERSIONS = 2


def remove_old_versions(series: Path, needed: Path | None = None) -> None:
    """All whose name is a number, but the newest two, and `needed` and those after it."""
    versions = sorted((path for path in series.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    for old in versions[:-KEEP_VERSIONS]:
        if needed is None or int(old.name) < int(needed.name):
            shutil.rmtree(old)


class DeltaSeries:
    """Writes versions as what changed since the one before; every rank calls it, the first one writes.

    The first rank has the last version in main memory.
    """

    def __init__(self) -> None:
        self._checkpoint: Path | None = None
        self._last: Path | None = None
        self._held: HostWeights | None = None
        self._room = 0

    def begin(self, checkpoint: Path, ranks: Ranks) -> None:
        """Take the checkpoint in this folder, a version like those to come, for the one before the next.

        The series before stays until the next version: servers may still be started from it.
        """
        if ranks.first:
            if self._held is not None:
                self._held.close()
            self._held = HostWeights.read(checkpoint)
            remove_old_versions(checkpoint.parent, self._checkpoint)
            self._room = _size(checkpoint)
        self._checkpoint = self._last = checkpoint

    def add(self, folder: Path, new: Iterable[tuple[str, Tensor]], ranks: Ranks) -> bool:
        """Write a version into `folder`, atomically; `new` are its weights under the names in the files.

        Nothing is written, and False returned, where a checkpoint has to come first: `folder` does not follow the
        last version, or what changed since the last checkpoint is together larger than that.
        """
        last = self._last
        if last is None or last.parent != folder.parent or int(last.name) >= int(folder.name):
            return False
        self._last = None  # of no use if this fails
        if not ranks.broadcast(self._write(folder, last, new) if ranks.first else _gathered(new)):
            return False
        if ranks.first:
            remove_old_versions(folder.parent, self._checkpoint)
        self._last = folder
        return True

    def _write(self, folder: Path, last: Path, new: Iterable[tuple[str, Tensor]]) -> bool:
        assert self._held is not None
        with saving(folder), replaced_folder(folder) as made:
            self._room -= write_delta(made, self._held, last.name, new)
        return self._room >= 0


def _gathered(tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Take part in gathering them."""
    return all(True for _ in tensors)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
