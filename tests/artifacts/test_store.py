"""Artifacts appear whole or not at all, and their digest equals DVC's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dvc_data.hashfile.build import build
from dvc_data.hashfile.db import HashFileDB
from dvc_objects.fs.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from armature.components.artifacts.disk import atomic_folder, link_folder
from armature.components.artifacts.manifest import open_artifact, read_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.digests import folder_digest
from tests.artifacts.filling import fill_with
from tests.refusals import refused

names = st.text("abcß.-_ 0", min_size=1, max_size=6).filter(lambda name: name.strip(". ") == name)


def dvc_digest(folder: Path, cache: Path) -> str:
    filesystem = LocalFileSystem()
    _, _, built = build(HashFileDB(filesystem, str(cache)), str(folder), filesystem, "md5", dry_run=True)
    return built.hash_info.value


@given(files=st.dictionaries(names, st.binary(max_size=40), min_size=1, max_size=5))
def test_folder_digest_equals_dvc(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("folder")
    for number, (name, content) in enumerate(files.items()):
        target = folder / ("sub" if number % 2 else ".") / f"f{name}"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content)
    assert folder_digest(folder) == dvc_digest(folder, tmp_path_factory.mktemp("cache"))


def test_artifact_is_found_by_fingerprint_and_digest(tmp_path):
    store = ArtifactStore(tmp_path)
    assert store.find("stage", "f1") is None
    made = store.write("stage", "f1", fill_with({"x/y.bin": b"1"}))
    assert store.find("stage", "f1") == made == store.find_digest(made.digest[:10])
    assert list(store) == [made]
    assert made.digest == folder_digest(made.path)


def test_failed_attempt_leaves_no_files(tmp_path):
    store = ArtifactStore(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        store.write("stage", "f1", fail)
    assert store.find("stage", "f1") is None
    assert list((tmp_path / "stage").iterdir()) == []


def test_first_of_two_writers_wins(tmp_path):
    home = tmp_path / "home"
    with atomic_folder(home) as first:
        (first / "who").write_text("first")
        with atomic_folder(home) as second:
            (second / "who").write_text("second")
    assert (home / "who").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import DataError
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    ArtifactStore(Path(sys.argv[1])).write("stage", "f1", lambda folder: (folder / "big").write_bytes(b"0" * 10_000))
except DataError as error:
    print(error.code)
"""


def test_full_disk_raises_disk_full_and_leaves_no_files(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "disk_full\n"
    assert list((tmp_path / "stage").iterdir()) == []


def test_changed_file_is_rejected(tmp_path):
    made = ArtifactStore(tmp_path).write("stage", "f1", fill_with({"x": b"1"}))
    assert open_artifact(made.path) == made
    (made.path / "x").write_bytes(b"2")
    with refused("artifact_changed", made.path):
        open_artifact(made.path)


def test_rejects_missing_mismatched_and_unreadable_manifest(tmp_path):
    with refused("manifest_missing", tmp_path):
        open_artifact(tmp_path)
    made = ArtifactStore(tmp_path).write("stage", "f1", fill_with({"x": b"1"}))
    with refused("artifact_kind_mismatch", "other", "stage"):
        open_artifact(made.path, "other")
    manifest = json.loads((made.path / "manifest.json").read_text()) | {"manifest_version": "new"}
    (made.path / "manifest.json").write_text(json.dumps(manifest))
    with refused("manifest_unreadable", "manifest_version"):
        read_manifest(made.path)


def test_hard_linked_copy_replaces_the_previous_one(tmp_path):
    store = ArtifactStore(tmp_path / "store")
    first = store.write("stage", "f1", fill_with({"x": b"1"}))
    second = store.write("stage", "f2", fill_with({"y": b"2"}))
    out = tmp_path / "data" / "out"
    link_folder(first.path, out)
    link_folder(second.path, out)
    assert open_artifact(out).digest == second.digest
    assert (out / "y").stat().st_ino == (second.path / "y").stat().st_ino


def test_another_machine_fetches_an_artifact_from_the_remote(tmp_path):
    remote = (tmp_path / "remote").as_uri()
    one = ArtifactStore(tmp_path / "one", remote)
    made = one.write("stage", "f1", fill_with({"x/y": b"1", "z": b"2"}))
    one.send_waiting()
    fetched = ArtifactStore(tmp_path / "two", remote).find("stage", "f1")
    assert fetched is not None and fetched.digest == made.digest and fetched.path != made.path


def test_set_aside_moves_artifacts_and_deletes_remote_copies(tmp_path):
    remote = tmp_path / "remote"
    store = ArtifactStore(tmp_path / "store", remote.as_uri())
    for stage, fingerprint in (("stage", "f1"), ("units", "f1-00001"), ("units", "f2-00001")):
        store.write(stage, fingerprint, fill_with({"x": fingerprint.encode()}, kind=stage))
    (store.workspace("stage", "f1") / "history").write_text("1")
    store.send_waiting()
    with store.lock("stage", "f1"):
        store.set_aside("stage", "f1")
        assert store.find("stage", "f1") is None and store.find("units", "f1-00001") is None
        assert store.find("units", "f2-00001") is not None
        assert [path.name for path in store.workspace("stage", "f1").iterdir()] == [".lock"]
    (aside,) = (store.root / "replaced").iterdir()
    assert sorted(path.name for path in aside.rglob("*") if path.is_file()) == [
        *("f1-00001.digest", "f1.digest", "history", "manifest.json", "manifest.json", "x", "x")
    ]
    made = store.write("stage", "f1", fill_with({"x": b"new"}))
    other = ArtifactStore(tmp_path / "other", remote.as_uri())
    assert other.find_digest(made.digest) == other.find("stage", "f1") and other.find("units", "f1-00001") is None
