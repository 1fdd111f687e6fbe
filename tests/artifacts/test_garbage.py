"""What a collection of a remote store deletes and what it leaves. The store is a folder whose files are made old."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from armature.components.artifacts.garbage import delete_garbage, find_garbage
from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.remote_folder import RemoteFolder
from armature.components.artifacts.store import ArtifactStore
from armature.components.batches.table import write_batch
from armature.components.contracts.batches import Sample
from armature.components.contracts.machine import Machine
from armature.garbage import collect
from tests.refusals import refused

WEEK = timedelta(days=7)
F1, F2, F3 = ("f1" * 10, "f2" * 10, "f3" * 10)


class Shared:
    """A remote store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.remote = RemoteFolder(str(folder), print)

    def machine(self, name: str) -> ArtifactStore:
        return ArtifactStore(self.folder.parent / name, str(self.folder))

    def names(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}

    def age(self, days: float) -> None:
        """All that is there becomes older, also in what the last collection said."""
        for path in self.folder.rglob("*"):
            then = path.stat().st_mtime - days * 86400
            os.utime(path, (then, then))
        unused = self.folder / "garbage/unused.json"
        if unused.exists():
            import json

            said = {pack: datetime.fromisoformat(since) for pack, since in json.loads(unused.read_text()).items()}
            earlier = {pack: (since - timedelta(days=days)).isoformat() for pack, since in said.items()}
            unused.write_text(json.dumps(earlier))

    def collect(self) -> set[str]:
        """The names of what was deleted."""
        found = find_garbage(self.remote, WEEK)
        delete_garbage(self.remote, found)
        return {garbage.name for garbage in found.garbage}


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path / "remote")


def filled(folder: Path) -> None:
    (folder / "x").write_bytes(os.urandom(8))
    write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})


def shows(images: ImageStore, color: str) -> Callable[[Path], None]:
    """Fills a batch whose one sample shows an image."""

    def fill(folder: Path) -> None:
        ref = images.put(encode_png(Image.new("RGB", (8, 8), color)))
        ids, numbers = np.zeros(2, np.int32), np.zeros(2, np.float32)
        write_batch(folder, [Sample("s", "g", "t", ids, ids > 0, numbers, ids, numbers, 0.0, (ref,))])
        write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    return fill


def push(store: ArtifactStore, fingerprint: str, fill: Callable[[Path], None] = filled) -> None:
    store.write("stage", fingerprint, fill)
    store.settle()


def checkpoint(store: ArtifactStore, step: int) -> None:
    folder = store.workspace("stage", F1) / f"trainer/checkpoints/step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "tensors").write_bytes(b"1")
    store.send_checkpoint("stage", F1, folder)
    store.settle()


def test_what_is_in_use_stays_however_old(shared):
    store = shared.machine("one")
    push(store, F2, shows(ImageStore(store.images), "red"))
    checkpoint(store, 2)
    shared.age(1000)
    before = shared.names()
    assert shared.collect() == set() and shared.names() - {"garbage/unused.json"} == before


def test_what_arrived_in_part_goes_with_its_digest_once_it_is_old(shared):
    push(shared.machine("one"), F1)
    push(shared.machine("one"), F2)
    (shared.folder / f"stage/{F1}/manifest.json").unlink()
    shared.age(6)
    assert shared.collect() == set()
    shared.age(2)
    [digest] = [path for path in shared.folder.glob("digests/??/*") if F1 in path.read_text()]
    assert shared.collect() == {f"stage/{F1}", digest.relative_to(shared.folder).as_posix()}
    assert {name.split("/")[1] for name in shared.names() if name.startswith("stage/")} == {F2}


def test_checkpoints_go_when_the_training_is_finished_or_a_later_one_is_there(shared):
    store = shared.machine("one")
    checkpoint(store, 2)
    [kept] = {name.split("/")[2] for name in shared.names() if name.startswith("workspaces/") and "step-" in name}
    (shared.folder / f"workspaces/stage-{F1}/123/half").mkdir(parents=True)
    (shared.folder / f"workspaces/stage-{F1}/123/half/tensors").write_bytes(b"1")
    shared.age(8)
    assert shared.collect() == {f"workspaces/stage-{F1}/123"}
    assert (shared.folder / f"workspaces/stage-{F1}" / kept).exists()
    push(store, F1)
    shared.age(8)
    assert shared.collect() == {f"workspaces/stage-{F1}"}


def test_a_lease_that_was_left_goes_and_one_that_is_held_stays(shared):
    store = shared.machine("one")
    with store.lease("stage", F1):
        pass
    shared.age(8)
    with store.lease("stage", F2):
        assert shared.collect() == {f"leases/stage-{F1}"}


def test_images_that_no_artifact_shows_go_a_week_after_they_were_found(shared):
    store = shared.machine("one")
    push(store, F1, shows(ImageStore(store.images), "red"))
    push(store, F2, shows(ImageStore(store.images), "blue"))
    with store.lock("stage", F1):
        store.set_aside("stage", F1)
    packs = {name for name in shared.names() if name.endswith(".zip")}
    assert len(packs) == 2
    for days, deleted in ((8, 0), (6, 0), (2, 1)):
        shared.age(days)
        assert len([name for name in shared.collect() if name in packs]) == deleted
    assert len([name for name in shared.names() if name.endswith(".zip")]) == 1


def test_images_that_are_found_unused_are_sent_again_by_who_shows_them(shared):
    store = shared.machine("one")
    push(store, F1, shows(ImageStore(store.images), "red"))
    with store.lock("stage", F1):
        store.set_aside("stage", F1)
    shared.age(8)
    shared.collect()
    [pack] = shared.folder.rglob("*.zip")
    before = pack.stat().st_mtime
    push(store, F3, shows(ImageStore(store.images), "red"))
    assert pack.stat().st_mtime > before
    shared.age(8)
    shared.collect()
    found = shared.machine("two").find("stage", F3)
    assert found is not None and list(shared.machine("two").images.glob("??/*.png"))


def test_what_changes_while_a_collection_runs_stays(shared):
    push(shared.machine("one"), F1)
    manifest = shared.folder / f"stage/{F1}/manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    shared.age(8)
    found = find_garbage(shared.remote, WEEK)
    assert [each.name for each in found.garbage][:1] == [f"stage/{F1}"]
    manifest.write_bytes(content)
    delete_garbage(shared.remote, found)
    assert manifest.exists() and (shared.folder / f"stage/{F1}/x").exists()


def test_a_dry_run_says_what_and_how_much_and_deletes_nothing(shared, capsys):
    push(shared.machine("one"), F1)
    (shared.folder / f"stage/{F1}/manifest.json").unlink()
    (shared.folder / f"stage/{F1}/large").write_bytes(bytes(3 * 2**20))
    shared.age(8)
    before = shared.names()
    machine = Machine(remote_store=str(shared.folder))
    collect(machine, days=7, dry_run=True)
    said = capsys.readouterr().out
    assert (
        f"stage/{F1}: artifact that arrived in part, 2 files, 3.0 MiB" in said and "would be deleted: 3 files" in said
    )
    assert shared.names() == before
    collect(machine, days=7, dry_run=False)
    assert "\ndeleted: 3 files" in capsys.readouterr().out and f"stage/{F1}/large" not in shared.names()


FOREIGN = (
    "projects/thesis/deep/a.txt",
    "photos/2020/b.jpg",
    "images/2020/b.zip",
    f"images/00/{'1' * 64}.zip",
    "digests/README",
    "digests/ab/cd",
    "workspaces/mine/notes",
    "leases/flat/contract.pdf",
    f"cache/{'a' * 40}/object",
    "garbage/collection/bin",
)


def test_files_of_others_stay_however_old(shared):
    push(shared.machine("one"), F1)
    (shared.folder / f"stage/{F1}/manifest.json").unlink()
    for name in FOREIGN:
        (shared.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (shared.folder / name).write_bytes(b"theirs")
    shared.age(1000)
    assert f"stage/{F1}" in shared.collect() and shared.names() >= set(FOREIGN)
    assert all((shared.folder / name).read_bytes() == b"theirs" for name in FOREIGN)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"null"])
def test_what_cannot_be_read_ends_the_collection_before_anything_is_deleted(shared, content):
    push(shared.machine("one"), F1)
    push(shared.machine("one"), F2)
    (shared.folder / f"stage/{F1}/manifest.json").unlink()
    [digest] = [path for path in shared.folder.glob("digests/??/*") if F2 in path.read_text()]
    digest.write_bytes(content)
    shared.age(8)
    before = shared.names()
    with refused("remote_record_unreadable", "digests/"):
        collect(Machine(remote_store=str(shared.folder)), days=7, dry_run=False)
    assert shared.names() == before


@pytest.mark.parametrize("within", [".", "remote"])
def test_the_store_of_this_machine_is_no_remote_store(tmp_path, within):
    machine = Machine(store=str(tmp_path), remote_store=str(tmp_path / within))
    with refused("remote_store_inside_store", str(tmp_path / within)):
        collect(machine, days=7, dry_run=True)
    with refused("remote_store_inside_store", str(tmp_path / within)):
        ArtifactStore(tmp_path, str(tmp_path / within))


def test_without_a_remote_store_it_says_so():
    with refused("remote_store_missing"):
        collect(Machine(), days=7, dry_run=True)
