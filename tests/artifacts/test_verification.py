"""A changed artifact is rejected, whether its files, its manifest or its record changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from armature.components.artifacts.disk import link_folder
from armature.components.artifacts.record import SETTLED_NS
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.digests import folder_digest
from armature.components.contracts.errors import DataError
from tests.artifacts.filling import fill_with
from tests.refusals import refused

FILES = {"x": b"1234", "sub/y": b"5678"}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def settled(store: ArtifactStore) -> Path:
    """Return the folder of an artifact that was written so long ago that its record is trusted."""
    home = store.write("stage", "f1", fill_with(FILES)).path
    sidecar = home.with_name("f1.digest")
    later = sidecar.stat().st_mtime_ns + 60 * 10**9
    os.utime(sidecar, ns=(later, later))
    return home


def same_size(home: Path) -> None:
    (home / "x").write_bytes(b"4321")


def times_put_back(home: Path) -> None:
    before = (home / "x").stat()
    (home / "x").write_bytes(b"4321")
    os.utime(home / "x", ns=(before.st_atime_ns, before.st_mtime_ns))


def another_inode(home: Path) -> None:
    before = (home / "x").stat()
    (home / "x2").write_bytes(b"4321")
    os.utime(home / "x2", ns=(before.st_atime_ns, before.st_mtime_ns))
    (home / "x2").rename(home / "x")


def file_for_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"")


def link_for(path: Path) -> None:
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def change_manifest(home: Path, **values: object) -> None:
    path = home / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_kind(home: Path) -> None:
    change_manifest(home, kind="other")
    home.with_name("f1.digest").unlink()


EDITS: dict[str, Callable[[Path], object]] = {
    "same size": same_size,
    "times put back": times_put_back,
    "another inode": another_inode,
    "file added": lambda home: (home / "more").touch(),
    "file removed": lambda home: (home / "sub/y").unlink(),
    "file renamed": lambda home: (home / "x").rename(home / "z"),
    "file in place of a folder": lambda home: file_for_folder(home / "sub"),
    "link in place of a file": lambda home: link_for(home / "x"),
    "link in place of a folder": lambda home: link_for(home / "sub"),
    "dangling link": lambda home: (home / "more").symlink_to("nowhere"),
    "pipe": lambda home: os.mkfifo(home / "pipe"),
    "rows in the manifest": lambda home: change_manifest(home, rows={"x": 2}),
    "kind in the manifest": change_kind,
    "file in place of the artifact": file_for_folder,
}
"""Edits of an artifact, by name; tests/fuzz damages the contents of files at random."""


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edited_artifact_is_rejected(store, edit):
    edit(settled(store))
    with pytest.raises(DataError):
        store.find("stage", "f1")


def test_edit_right_after_writing_is_noticed(store):
    made = store.write("stage", "f1", fill_with(FILES))
    (made.path / "x").write_bytes(b"4321")
    with refused("artifact_changed"):
        store.find("stage", "f1")


def test_files_are_trusted_once_they_were_read_after_they_had_settled(store, monkeypatch):
    """A record that is written with the files does not trust them. It must not stay so for ever."""
    home = store.write("stage", "f1", fill_with(FILES)).path
    newest = max(path.stat().st_ctime_ns for path in home.rglob("*") if path.is_file())
    sidecar = home.with_name("f1.digest")
    store.find("stage", "f1")
    assert sidecar.stat().st_mtime_ns < newest + SETTLED_NS
    monkeypatch.setattr("armature.components.artifacts.record.SETTLED_NS", 10**7)
    time.sleep(0.1)
    os.utime(sidecar, ns=(newest, newest))
    store.find("stage", "f1")
    assert sidecar.stat().st_mtime_ns > newest + 10**7
    same_size(home)
    with refused("artifact_changed", home):
        store.find("stage", "f1")


def test_error_names_changed_added_and_removed_files(store):
    home = settled(store)
    for edit in ("same size", "file added", "file removed"):
        EDITS[edit](home)
    with refused("artifact_changed", home) as caught:
        store.find("stage", "f1")
    assert {"x", "more", "sub/y"} <= set(re.split("[ ,;]+", caught.value.what))


@pytest.mark.parametrize(
    "text", ["", "garbage", "0" * 32 + ".dir", "{}", "[]", "\x00\xff", '{"digest": "a", "files": {}}']
)
def test_invalid_record_is_rebuilt(store, text):
    made = store.find("stage", settled(store).name)
    made.path.with_name("f1.digest").write_bytes(text.encode("latin-1"))
    assert store.find("stage", "f1") == made and made.digest == folder_digest(made.path)
    assert [each.digest for each in store] == [made.digest]


@pytest.mark.parametrize("text", ["", "garbage"])
def test_edit_is_noticed_without_a_valid_record(store, text):
    home = settled(store)
    same_size(home)
    home.with_name("f1.digest").write_text(text)
    with refused("artifact_changed"):
        store.find("stage", "f1")


def test_record_of_a_deleted_artifact_is_ignored(store):
    shutil.rmtree(settled(store))
    assert store.find("stage", "f1") is None
    made = store.write("stage", "f1", fill_with({"x": b"other"}))
    assert store.find("stage", "f1") == made and made.digest == folder_digest(made.path)


FIND = """
import sys; from pathlib import Path; from armature.components.artifacts.store import ArtifactStore
sys.addaudithook(lambda event, arguments: print(arguments[0]) if event == "open" else None)
ArtifactStore(Path(sys.argv[1])).find("stage", "f1")
"""


def test_unchanged_files_are_not_read(store):
    home = settled(store)
    done = subprocess.run([sys.executable, "-c", FIND, str(store.root)], capture_output=True, text=True, check=True)
    opened = done.stdout.splitlines()
    assert str(home / "manifest.json") in opened and str(home / "x") not in opened


def test_hard_linked_and_copied_stores_have_the_same_artifact(store, tmp_path):
    home = settled(store)
    made = store.find("stage", "f1")
    link_folder(home, tmp_path / "data/out")  # changes every inode's change time
    assert store.find("stage", "f1") == made
    shutil.copytree(store.root, tmp_path / "copy")
    assert ArtifactStore(tmp_path / "copy").find("stage", "f1").digest == made.digest
    (tmp_path / "data/out/x").write_bytes(b"4321")  # an edit through the link changes the store, too
    with refused("artifact_changed"):
        store.find("stage", "f1")


def test_one_damaged_artifact_does_not_hide_the_others(store):
    same_size(settled(store))
    made = store.write("stage", "f2", fill_with({"x": b"other"}))
    assert store.find_digest(made.digest[:8]) == made == store.find("stage", "f2")


FULL_AT_THE_RECORD = """
import errno, os, sys
from pathlib import Path
from armature.components.artifacts import manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import DataError
home = Path(sys.argv[1]) / "stage" / "f1"

def refuse(event, arguments):  # the disk takes nothing more once the artifact is in its place
    if event == "open" and home.is_dir() and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def fill(folder):
    (folder / "x").write_bytes(b"1")
    manifest.write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})
    sys.addaudithook(refuse)

try:
    ArtifactStore(Path(sys.argv[1])).write("stage", "f1", fill)
except DataError as error:
    print(error.code)
"""


def test_full_disk_at_the_record_keeps_the_artifact(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_AT_THE_RECORD, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "disk_full\n", done.stderr
    artifact = ArtifactStore(tmp_path).find("stage", "f1")
    assert artifact is not None and artifact.digest == folder_digest(artifact.path)


def test_verify_reads_files_whose_recorded_state_matches(store):
    """The record is changed such that it describes the edited file."""
    home = settled(store)
    store.write("other-stage", "f2", fill_with({"x": b"other"}, "other-stage"))
    same_size(home)
    sidecar = home.with_name("f1.digest")
    record = json.loads(sidecar.read_text())
    state = (home / "x").stat()
    record["files"]["x"][1] = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    sidecar.write_text(json.dumps(record))
    later = state.st_ctime_ns + 60 * 10**9
    os.utime(sidecar, ns=(later, later))
    assert store.find("stage", "f1") is not None
    checked = dict(store.verify())
    assert checked.pop(home).code == "artifact_changed" and list(checked.values()) == [None]


def test_folder_in_place_of_the_record_is_rejected(store: ArtifactStore) -> None:
    sidecar = settled(store).with_name("f1.digest")
    sidecar.unlink()
    sidecar.mkdir()
    with refused("not_a_file", "f1.digest"):
        store.find("stage", "f1")
