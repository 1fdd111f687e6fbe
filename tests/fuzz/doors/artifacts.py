"""Finished artifacts that were changed on disk after they were made."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from armature.components.artifacts.manifest import MANIFEST, write_manifest
from armature.components.artifacts.store import ArtifactStore
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, damaged_document, dumps

KEY = "0123456789abcdef0123"
FILES = {"data.txt": b"0,1,2\n3,4,5\n" * 9, "more/deep.json": b'{"a": [1, 2, 3]}', "empty": b""}


def fill(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder, kind="made", kind_version=1, rows={"data": 2}, drops={}, inputs={}, settings={"a": 1})


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    store = ArtifactStore(folder / "store")
    store.write("made", KEY, fill)
    made = folder / "made"
    shutil.copytree(store.root, made)
    whole = content(store.home("made", KEY))

    def damage(root: Path, rng: random.Random) -> None:
        paths = sorted(path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
        path = rng.choice(paths)
        kind = rng.random()
        if path.name == MANIFEST and kind < 0.6:
            path.write_bytes(dumps(damaged_document(json.loads(path.read_bytes()), rng)))
        elif kind < 0.7:
            path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        elif kind < 0.8:
            path.unlink()
        elif kind < 0.9:
            (path.parent / "another").write_bytes(rng.randbytes(5))
        else:
            path.unlink()
            path.mkdir()

    def attempt(rng: random.Random) -> bool:
        root = folder / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(made, root)
        damage(root, rng)
        opened = ArtifactStore(root)
        result = opened.find("made", KEY)
        if result is None:
            return False
        now = content(opened.home("made", KEY))
        for name in whole.keys() | now.keys():
            if name != MANIFEST:
                expect(now.get(name) == whole.get(name), f"{name} has changed and the artifact is used")
        before, after = json.loads(whole[MANIFEST]), json.loads(now[MANIFEST])
        same = before == after and all(type(before[key]) is type(after[key]) for key in before)
        expect(same, "the manifest has changed and the artifact is used")
        return True

    yield attempt
