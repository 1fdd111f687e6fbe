"""A store of a million images against one of a thousand, and small files that are sent to S3."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.batches import Sample
from armature.components.contracts.images import ImageRef
from armature.components.rollouts.batches.table import write_batch
from benchmarks.table import Row, alternate, seconds

LARGE, SMALL, ROUNDS, SHOWN = 1_000_000, 1_000, 9, 32
ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-cluster/bin/python"


def measure() -> list[Row]:
    return [*_sizes(), *_files()]


class _Store:
    """A store whose image folder has `size` images, with a remote store."""

    def __init__(self, folder: Path, size: int) -> None:
        self.store = ArtifactStore(folder / "store", str(folder / "remote"))
        self.images = ImageStore(self.store.images)
        self.digests = [hashlib.sha256(f"{number}".encode()).hexdigest() for number in range(size)]
        self._numbers = count()
        for first in range(256):
            (self.store.images / f"{first:02x}").mkdir(parents=True)
        for digest in self.digests:
            os.close(os.open(self.images.path(ImageRef(digest, "image/png", 8, 8)), os.O_CREAT | os.O_WRONLY))
        self.shown = [self.put() for _ in range(SHOWN - 1)]

    def begin(self) -> None:
        with self.store.lock("stage", "f"):
            pass

    def put(self) -> ImageRef:
        pixels = np.frombuffer(f"{next(self._numbers):0192d}".encode(), np.uint8).reshape(8, 8, 3)
        return self.images.put(encode_png(Image.fromarray(pixels)))

    def push(self) -> None:
        """Write an artifact that shows a new image and several images that the store already had. It is sent to the
        remote store."""

        def fill(folder: Path) -> None:
            ids, numbers = np.zeros(2, np.int32), np.zeros(2, np.float32)
            shown = (self.put(), *self.shown)
            write_batch(folder, [Sample("s", "g", "t", ids, ids > 0, numbers, ids, numbers, 0.0, shown)])
            write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})

        self.store.write("stage", f"f{next(self._numbers)}", fill)

    def read(self) -> None:
        for digest in self.digests[:SHOWN]:
            self.images.path(ImageRef(digest, "image/png", 8, 8)).read_bytes()


def _sizes() -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        large, small = (_Store(Path(scratch) / f"{size}", size) for size in (LARGE, SMALL))
        actions: dict[str, Callable[[_Store], object]] = {
            "a stage begins": _Store.begin,
            f"{SHOWN} images are read": _Store.read,
            "an image is stored": _Store.put,
            f"an artifact that shows {SHOWN} images, one of them new, is sent": _Store.push,
        }
        rows = []
        for what, action in actions.items():
            both = alternate(ROUNDS, lambda: seconds(lambda: action(large)), lambda: seconds(lambda: action(small)))  # noqa: B023
            row = Row(what, both.ours, both.baseline, f"with {SMALL:,}", "s", "lower", f"with {LARGE:,}", both.spread)
            rows.append(row)
        return rows


def _files() -> list[Row]:
    if not PYTHON.exists():
        python = getattr(sys, "_base_executable", sys.executable)
        subprocess.run([python, "-m", "armature.setup", "cluster"], cwd=ROOT, check=True)
    output = subprocess.check_output([PYTHON, "-m", "benchmarks.store_s3"], cwd=ROOT, text=True)
    return [Row(**row) for row in json.loads(output.splitlines()[-1])]
