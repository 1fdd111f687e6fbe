"""A remote store that does not answer for a while or for good: no artifact is lost or wrongly reported as missing.

The faults come from an fsspec file system that refuses requests as one behind a broken network does.
"""

from __future__ import annotations

import errno
import hashlib
import threading
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image
from pydantic import BaseModel

from armature.commands.store import send
from armature.components.artifacts import images as image_archive
from armature.components.artifacts import remote_folder
from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.remote import MARKER, NamedArtifact, RemoteMarker
from armature.components.artifacts.remote_folder import RemoteFolder, Source
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import StoreError
from armature.components.contracts.stages import Artifact
from armature.components.rollouts.batches.table import read_batch, write_batch
from tests.artifacts.filling import fill_with
from tests.refusals import refused

URL = "unsteady://bucket/prefix"


class Unsteady(MemoryFileSystem):
    """An fsspec file system in memory whose next `refusals` requests fail with `error`. `asked` lists all requests."""

    protocol = "unsteady"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    refusals = 0
    error: Exception = ConnectionError("no route to host")
    asked: list = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("unsteady:/"))

    @classmethod
    def _answer(cls, what: str, path: str) -> None:
        cls.asked.append((what, path.rpartition("/")[2]))
        if cls.refusals > 0:
            cls.refusals -= 1
            raise cls.error

    def info(self, path, **kwargs):
        self._answer("info", path)
        return super().info(path, **kwargs)

    def put_file(self, lpath, rpath, **kwargs):
        self._answer("put", rpath)
        return super().put_file(lpath, rpath, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        self._answer("write", path)
        return super().pipe_file(path, value, **kwargs)

    def get_file(self, rpath, lpath, **kwargs):
        self._answer("get", rpath)
        return super().get_file(rpath, lpath, **kwargs)


@pytest.fixture(autouse=True)
def unsteady(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Unsteady]]:
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    monkeypatch.setattr(remote_folder, "RETRY_WAITS_S", (0.0, 0.0), raising=False)
    monkeypatch.setattr(Unsteady, "refusals", 0)
    monkeypatch.setattr(Unsteady, "error", ConnectionError("no route to host"))
    Unsteady.store.clear()
    Unsteady.asked.clear()
    yield Unsteady
    Unsteady.store.clear()


def made_on(store: ArtifactStore, fill: Callable[[Path], None] | None = None) -> Artifact:
    made = store.write("stage", "f1", fill or filled())
    store.send_waiting()
    return made


def filled(content: bytes = b"1") -> Callable[[Path], None]:
    return fill_with({"x": content, "sub/y": b"2"})


def digest_in(store: ArtifactStore) -> str | None:
    """Return the digest of the artifact stage/f1 that `store` finds, locally or in the remote store. Return None if
    there is none."""
    artifact = store.find("stage", "f1")
    return artifact.digest if artifact else None


X, Y = (hashlib.md5(content).hexdigest() for content in (b"1", b"2"))
"""Names that the remote store gives to the files `x` and `sub/y`: the MD5 of their contents."""


@pytest.mark.parametrize(
    "error", [ConnectionError("reset"), TimeoutError("slow"), OSError(5, "I/O"), RuntimeError("503")]
)
def test_temporary_errors_are_retried(tmp_path, unsteady, monkeypatch, error):
    monkeypatch.setattr(unsteady, "error", error)
    unsteady.refusals = 2
    made = made_on(ArtifactStore(tmp_path / "one", URL))
    unsteady.refusals = 2
    assert digest_in(ArtifactStore(tmp_path / "two", URL)) == made.digest


def test_each_retry_prints_a_message(tmp_path, unsteady):
    messages: list[str] = []
    unsteady.refusals = 2
    made_on(ArtifactStore(tmp_path, URL, say=messages.append))
    assert len(messages) == 2 and all("does not answer" in line and "no route to host" in line for line in messages)


def test_failed_files_are_retried_while_others_arrive(tmp_path, unsteady, monkeypatch):
    put, attempts = unsteady.put_file, dict.fromkeys((f"{number}" for number in range(8)), 0)

    def lossy(self, lpath, rpath, **kwargs):
        name = Path(lpath).name
        if name in attempts:
            attempts[name] += 1
            if attempts[name] <= int(name):
                raise ConnectionError("reset")
        put(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(unsteady, "put_file", lossy)
    fill = fill_with({name: name.encode() for name in attempts})
    made = made_on(ArtifactStore(tmp_path / "one", URL, say=lambda line: None), fill)
    assert list(attempts.values()) == list(range(1, 9))
    assert digest_in(ArtifactStore(tmp_path / "two", URL)) == made.digest


def test_unsent_artifact_is_sent_by_the_next_stage(tmp_path, unsteady):
    unsteady.refusals = 10**6
    messages: list[str] = []
    store = ArtifactStore(tmp_path / "one", URL, say=messages.append)
    made = store.write("stage", "f1", filled())
    assert messages[-1].startswith("warning: not sent") and str(store.root) in messages[-1]
    unsteady.asked.clear()
    store.write("stage", "f2", filled())
    assert unsteady.asked == []  # an unreachable remote does not delay further artifacts
    with refused("remote_store_unreachable", URL):
        store.send_waiting()
    assert not store.send_waiting_or_warn()
    unsteady.refusals = 0
    assert ArtifactStore(tmp_path / "two", URL).find("stage", "f1") is None
    later = ArtifactStore(tmp_path / "one", URL)
    with later.lock("another", "f3"):
        assert digest_in(ArtifactStore(tmp_path / "two", URL)) == made.digest
    assert later.send_waiting() == 0
    unsteady.asked.clear()
    ArtifactStore(tmp_path / "one", URL).find("stage", "f1")
    assert unsteady.asked == []  # an artifact that was sent is not looked up again


def test_store_send_command_sends_waiting_artifacts(tmp_path, unsteady, capsys):
    unsteady.refusals = 10**6
    ArtifactStore(tmp_path, URL, say=lambda line: None).write("stage", "f1", filled())
    facts = [f"store={tmp_path}", f"remote_store={URL}"]
    with refused("remote_store_unreachable", URL):
        send("train-vlm/colors", facts)
    unsteady.refusals = 0
    send("train-vlm/colors", facts)
    assert f"{URL}: 1 " in capsys.readouterr().out and ArtifactStore(tmp_path / "two", URL).find("stage", "f1")
    with refused("remote_store_missing", "machine.remote_store"):
        send("train-vlm/colors", facts[:1])


def test_artifact_made_without_a_remote_is_sent_after_its_next_use(tmp_path):
    made = ArtifactStore(tmp_path / "one").write("stage", "f1", filled())
    store = ArtifactStore(tmp_path / "one", URL)
    assert store.send_waiting() == 0 and store.find("stage", "f1") is not None and store.send_waiting() == 1
    assert digest_in(ArtifactStore(tmp_path / "two", URL)) == made.digest


def test_unreachable_remote_is_not_a_missing_artifact(tmp_path, unsteady):
    made_on(ArtifactStore(tmp_path / "one", URL))
    unsteady.refusals = 10**6
    with refused("remote_store_unreachable"):
        ArtifactStore(tmp_path / "two", URL).find("stage", "f1")


def test_interrupted_push_is_invisible_and_resumes(tmp_path, unsteady, monkeypatch):
    put = unsteady.put_file

    def stop_at_y(self, lpath, rpath, **kwargs):
        if rpath.endswith(Y):
            raise PermissionError("no more")
        put(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(unsteady, "put_file", stop_at_y)
    with refused("remote_store_access_denied"):
        made_on(ArtifactStore(tmp_path / "one", URL, say=lambda line: None))
    monkeypatch.setattr(unsteady, "put_file", put)
    other = ArtifactStore(tmp_path / "two", URL)
    assert ("put", X) in unsteady.asked and other.find("stage", "f1") is None
    unsteady.asked.clear()
    ArtifactStore(tmp_path / "one", URL).send_waiting()
    assert ("put", X) not in unsteady.asked and ("put", Y) in unsteady.asked
    assert other.find("stage", "f1") is not None


def homes() -> set[str]:
    """Return the names of the remote folders that have a copy of the artifact stage/f1."""
    return {path.split("/")[5] for path in Unsteady.store if path.startswith("/bucket/prefix/stage/f1/")} - {MARKER}


def test_second_machine_adopts_the_artifact_of_the_first(tmp_path):
    """The contents differ, as results of training on GPUs do."""
    messages: list[str] = []
    one, two = ArtifactStore(tmp_path / "one", URL), ArtifactStore(tmp_path / "two", URL, say=messages.append)
    first, second = (store.write("stage", "f1", filled(bytes([n]))) for n, store in enumerate((one, two)))
    assert first.digest == second.digest and (second.path / "x").read_bytes() == b"\0"
    assert "another machine was first" in messages[-1] and first.digest in messages[-1]
    [aside] = (two.root / "replaced").glob("*/stage/f1/x")
    assert aside.read_bytes() == b"\1"
    assert len(homes()) == 1  # the copy of the second machine was deleted
    assert two.send_waiting() == 0 and two.find("stage", "f1") == second


@pytest.mark.parametrize("same", [False, True])
def test_one_of_several_simultaneous_pushes_wins(tmp_path, monkeypatch, same):
    """Every machine has sent its files before the first marker is created."""
    count, remote = 6, tmp_path / "remote"
    together, create = threading.Barrier(count), RemoteFolder.create

    def wait_at_marker(self: RemoteFolder, name: str, document: BaseModel) -> bool:
        together.wait(30)
        return create(self, name, document)

    monkeypatch.setattr(RemoteFolder, "create", wait_at_marker)

    def make(number: int) -> Artifact:
        store = ArtifactStore(tmp_path / f"{number}", str(remote), say=lambda line: None)
        return store.write("stage", "f1", filled(b"same" if same else bytes([number])))

    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(make, range(count)))
    assert len({each.digest for each in made}) == 1
    assert len({(each.path / "x").read_bytes() for each in made}) == 1
    assert len(list((remote / "stage/f1").iterdir())) == 2  # one copy, and the marker
    assert digest_in(ArtifactStore(tmp_path / "another", str(remote))) == made[0].digest


def test_late_push_adopts_the_artifact_of_another_machine(tmp_path, unsteady):
    one = ArtifactStore(tmp_path / "one", URL, say=lambda line: None)
    unsteady.refusals = 10**6
    assert (one.write("stage", "f1", filled(b"one")).path / "x").read_bytes() == b"one"
    unsteady.refusals = 0
    two = ArtifactStore(tmp_path / "two", URL).write("stage", "f1", filled(b"two"))
    with one.lock("another", "f2"):
        artifact = one.find("stage", "f1")
    assert artifact is not None and artifact.digest == two.digest and (artifact.path / "x").read_bytes() == b"two"


def test_lost_answer_to_marker_creation_causes_no_adoption(tmp_path, unsteady, monkeypatch):
    pipe, lost = unsteady.pipe_file, []

    def lose_answer(self, path, value, **kwargs):
        pipe(self, path, value, **kwargs)
        if path.endswith(MARKER) and not lost:
            lost.append(path)
            raise ConnectionError("reset")

    monkeypatch.setattr(unsteady, "pipe_file", lose_answer)
    store = ArtifactStore(tmp_path / "one", URL, say=lambda line: None)
    made_on(store)
    assert lost and not (store.root / "replaced").exists() and len(homes()) == 1


def test_force_waits_for_another_process_that_sends_the_artifact(tmp_path, monkeypatch):
    """--force moves the files only after sending has ended; then the remote has neither the files nor the marker."""
    one, two = (ArtifactStore(tmp_path / "one", URL, say=lambda line: None) for _ in range(2))
    assert two.remote is not None
    began, go_on, put = threading.Event(), threading.Event(), RemoteFolder.put
    with monkeypatch.context() as patched:
        patched.setattr(ArtifactStore, "_send", lambda *_: None)
        one.write("stage", "f1", filled())

    def slow_put(self: RemoteFolder, folder: str, files: Mapping[str, Path]) -> Collection[str]:
        began.set()
        assert go_on.wait(30)
        return put(self, folder, files)

    monkeypatch.setattr(RemoteFolder, "put", slow_put)
    sent: list[int] = []
    sender = threading.Thread(target=lambda: sent.append(two.send_waiting()))
    forced = threading.Thread(target=one.set_aside, args=("stage", "f1"))
    sender.start()
    assert began.wait(30)
    forced.start()
    forced.join(0.2)
    assert forced.is_alive() and one.home("stage", "f1").is_dir()
    go_on.set()
    for thread in (sender, forced):
        thread.join()
    assert sent == [1] and not one.home("stage", "f1").exists() and homes() == set()
    assert ArtifactStore(tmp_path / "another", URL).find("stage", "f1") is None


def test_artifact_discarded_during_sending_is_skipped(tmp_path, monkeypatch):
    store, put = ArtifactStore(tmp_path / "one", URL, say=lambda line: None), RemoteFolder.put

    def discard_first(self: RemoteFolder, folder: str, files: Mapping[str, Path]) -> Collection[str]:
        ArtifactStore(tmp_path / "one").discard("stage", "f1")
        return put(self, folder, files)

    with monkeypatch.context() as patched:
        patched.setattr(ArtifactStore, "_send", lambda *_: None)
        store.write("stage", "f1", filled())
    monkeypatch.setattr(RemoteFolder, "put", discard_first)
    assert store.send_waiting() == 1 and store.send_waiting() == 0


def test_unfinished_note_is_not_an_artifact(tmp_path):
    """A hidden file belongs to a process that is writing the note, or was killed while writing."""
    store = ArtifactStore(tmp_path / "one", URL)
    made_on(store)
    assert store.remote is not None
    unfinished = store.remote.state / "waiting/stage/.f2-x"
    unfinished.mkdir()
    assert store.send_waiting() == 0 and unfinished.exists()
    (unfinished / "lock").touch()
    with store.lock("stage", "f3"):
        assert not unfinished.exists()


def beaten(tmp_path: Path, unsteady: type[Unsteady]) -> ArtifactStore:
    """Return a store with an unsent artifact that another machine has made first."""
    store = ArtifactStore(tmp_path / "one", URL, say=lambda line: None)
    unsteady.refusals = 10**6
    store.write("stage", "f1", filled(b"one"))
    unsteady.refusals = 0
    ArtifactStore(tmp_path / "two", URL).write("stage", "f1", filled(b"two"))
    return store


def test_send_without_adopt_keeps_local_artifacts(tmp_path, unsteady):
    store = beaten(tmp_path, unsteady)
    store.send_waiting(adopt=False)
    assert (store.home("stage", "f1") / "x").read_bytes() == b"one"
    store.send_waiting()
    assert (store.home("stage", "f1") / "x").read_bytes() == b"two" and store.send_waiting() == 0


@pytest.mark.parametrize("meanwhile", ["set aside", "adopted", "fetched"])
def test_concurrent_change_while_adopting(tmp_path, unsteady, monkeypatch, meanwhile):
    store, get = beaten(tmp_path, unsteady), RemoteFolder.get
    other = ArtifactStore(tmp_path / "one", URL, say=lambda line: None)
    move = ArtifactStore._move_aside

    def act_first(self: RemoteFolder, files: Mapping[Path, Source]) -> None:
        monkeypatch.setattr(RemoteFolder, "get", get)
        if meanwhile == "set aside":
            other.set_aside("stage", "f1")
        elif meanwhile == "adopted":
            other.send_waiting()
        get(self, files)

    def fetch_then(self: ArtifactStore, name: str, paths: list[Path]) -> Path:
        aside = move(self, name, paths)
        assert other.find("stage", "f1") is not None
        return aside

    other.workspace("stage", "f1")
    monkeypatch.setattr(RemoteFolder, "get", act_first)
    if meanwhile == "fetched":
        monkeypatch.setattr(ArtifactStore, "_move_aside", fetch_then)
    store.send_waiting()
    if meanwhile == "set aside":
        assert not store.home("stage", "f1").exists()
    else:
        artifact = store.find("stage", "f1")
        assert artifact is not None and (artifact.path / "x").read_bytes() == b"two"
        assert len(list((store.root / "replaced").iterdir())) == 1
    store.send_waiting()
    assert store.send_waiting() == 0


def test_damaged_marker_does_not_stop_other_artifacts(tmp_path, unsteady):
    store = ArtifactStore(tmp_path / "one", URL, say=lambda line: None)
    unsteady.refusals = 10**6
    for fingerprint in ("f1", "f2"):
        store.write("stage", fingerprint, filled())
    unsteady.refusals = 0
    unsteady().pipe_file(f"{URL}/stage/f1/{MARKER}", b"{")
    with refused("remote_record_unreadable", f"stage/f1/{MARKER}"):
        store.send_waiting()
    assert ArtifactStore(tmp_path / "two", URL).find("stage", "f2") is not None


def test_full_disk_while_packing_images_prints_a_warning(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    messages: list[str] = []
    store = ArtifactStore(tmp_path / "one", URL, say=messages.append)
    monkeypatch.setattr("armature.components.artifacts.remote.write_archive", full)
    made = store.write("stage", "f1", shows(ImageStore(store.images), "red"))
    assert messages[-1].startswith("warning: not sent") and made.path.is_dir()


def test_remote_folder_works_without_hard_links(tmp_path, monkeypatch):
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr("os.link", no_links)
    remote = RemoteFolder(str(tmp_path), print)
    old, new = (NamedArtifact(stage="stage", fingerprint=name) for name in ("f1", "f2"))
    assert remote.create("a/document", old) and not remote.create("a/document", new)
    assert remote.read("a/document", NamedArtifact) == old


def test_artifact_deleted_while_fetching_is_not_found(tmp_path, monkeypatch):
    one, get = ArtifactStore(tmp_path / "one", URL), RemoteFolder.get
    made_on(one)

    def delete_first(self: RemoteFolder, files: Mapping[Path, Source]) -> None:
        one.discard("stage", "f1")
        get(self, files)

    monkeypatch.setattr(RemoteFolder, "get", delete_first)
    assert ArtifactStore(tmp_path / "two", URL).find("stage", "f1") is None


DAMAGED = {
    "empty": b"",
    "cut off": b"{",
    "a list": b"[]",
    "another type": b'{"%s": null}' % (b"a" * 64),
    "not UTF-8": b"\xff\xfe",
    "unknown field": b'{"stage": "stage", "fingerprint": "f1", "more": 1}',
    "a name with folders": b'{"stage": "stage/..", "fingerprint": "f1"}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("document", [MARKER, "digests"])
def test_damaged_document_is_rejected_with_its_address(tmp_path, unsteady, document, content):
    made = made_on(ArtifactStore(tmp_path / "one", URL))
    [path] = [path for path in unsteady.store if document in path]
    unsteady().pipe_file(path, content)
    two = ArtifactStore(tmp_path / "two", URL, say=lambda line: None)
    with refused("remote_record_unreadable", path.removeprefix("/bucket/prefix/")):
        two.find_digest(made.digest)
    if document == MARKER:
        with two.lock("stage", "f1"):
            two.set_aside("stage", "f1")  # as --force does
        assert two.find("stage", "f1") is None and made_on(two) is not None


def test_too_large_document_is_rejected(tmp_path, unsteady, monkeypatch):
    made_on(ArtifactStore(tmp_path / "one", URL))
    monkeypatch.setattr(remote_folder, "DOCUMENT_BYTES", 100)
    with refused("remote_record_unreadable", MARKER):
        ArtifactStore(tmp_path / "two", URL).find("stage", "f1")


@pytest.mark.parametrize("name", ["../sly", "/sly", "sub/../../sly", ""])
def test_rejects_marker_with_file_names_outside_the_artifact(tmp_path, unsteady, name):
    made_on(ArtifactStore(tmp_path / "one", URL))
    [path] = [path for path in unsteady.store if path.endswith(MARKER)]
    marker = RemoteMarker.model_validate_json(unsteady().cat_file(path))
    renamed = marker.model_copy(update={"files": {name: marker.files["x"]}})
    unsteady().pipe_file(path, renamed.model_dump_json().encode())
    with refused("unsafe_file_name", MARKER):
        ArtifactStore(tmp_path / "two", URL).find("stage", "f1")


@pytest.mark.parametrize("content", [b"", b"9", b"12345"])
def test_rejects_remote_file_with_changed_content(tmp_path, unsteady, content):
    made_on(ArtifactStore(tmp_path / "one", URL))
    [path] = [path for path in unsteady.store if path.endswith(X)]
    unsteady().pipe_file(path, content)
    two = ArtifactStore(tmp_path / "two", URL)
    with refused("remote_copy_damaged" if len(content) == 1 else "remote_file_size_mismatch"):
        two.find("stage", "f1")
    assert not two.home("stage", "f1").exists()


def test_names_with_fsspec_syntax_are_plain_names(tmp_path):
    """fsspec reads "::" as a chain of file systems and "*" as a pattern; folders, files and prefixes may have both."""
    fill = fill_with({name: name.encode() for name in ("a::b", "zip::c", "d[0]*?")})
    for remote in (f"file://{tmp_path}/a::b/[v2]*", f"{tmp_path}/zip::c", "unsteady://bucket/a::b"):
        made = made_on(ArtifactStore(tmp_path / remote[-4:] / "one::two", remote), fill)
        two = ArtifactStore(tmp_path / remote[-4:] / "two", remote)
        assert digest_in(two) == made.digest and (two.home("stage", "f1") / "a::b").read_text() == "a::b"
    assert {path.name for path in tmp_path.iterdir()} >= {"a::b", "zip::c"}


def test_remote_folder_writes_are_atomic(tmp_path, monkeypatch):
    """A full disk leaves neither a half-written document nor an occupied name."""
    remote = RemoteFolder(str(tmp_path), print)
    old, new = (NamedArtifact(stage="stage", fingerprint=name) for name in ("f1", "f2"))
    remote.write("a/document", old)

    def full(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:5])
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        for write in (remote.write, remote.create):
            with pytest.raises(OSError) as full_disk:
                write("a/document" if write == remote.write else "a/other", new)
            assert full_disk.value.errno == errno.ENOSPC
    assert remote.read("a/document", NamedArtifact) == old and remote.listed("a") == ["document"]
    assert remote.create("a/other", new) and not remote.create("a/other", old)
    assert remote.read("a/other", NamedArtifact) == new and remote.read("a/none", NamedArtifact) is None


@pytest.mark.parametrize("within", [".", "remote"])
def test_rejects_remote_store_inside_the_store(tmp_path, within):
    with refused("remote_store_inside_store", str(tmp_path / within)):
        ArtifactStore(tmp_path, str(tmp_path / within))


@pytest.mark.parametrize(
    ("error", "code"),
    [(PermissionError("key"), "remote_store_access_denied"), (FileNotFoundError("bucket"), "remote_store_not_usable")],
)
def test_permanent_errors_are_not_retried(tmp_path, unsteady, monkeypatch, error, code):
    monkeypatch.setattr(unsteady, "error", error)
    monkeypatch.setattr(unsteady, "info", MemoryFileSystem.info)
    unsteady.refusals = 10**6
    with refused(code, URL, kind=StoreError):
        made_on(ArtifactStore(tmp_path, URL, say=lambda line: None))
    assert ("put", X) in unsteady.asked and max(map(unsteady.asked.count, unsteady.asked)) == 2


@pytest.mark.parametrize(
    ("url", "code", "package"),
    [
        ("nonsense://bucket", "invalid_remote_store", ""),
        ("unsteady://", "invalid_remote_store", ""),
        ("s3:/bucket/prefix", "invalid_remote_store", ""),
        ("unsteady:///prefix", "invalid_remote_store", ""),
        ("s3//bucket/prefix", "invalid_remote_store", ""),
        ("remote", "invalid_remote_store", ""),
        ("memory://bucket", "invalid_remote_store", ""),
        ("S3://bucket", "package_missing", "armature-vla[s3]"),
        ("s3://bucket", "package_missing", "armature-vla[s3]"),
        ("gs://bucket", "package_missing", "gcsfs"),
        ("az://container", "package_missing", "adlfs"),
    ],
)
def test_rejects_unusable_address_and_names_the_missing_package(tmp_path, url, code, package):
    with refused(code, "machine.remote_store", url.lower(), package):
        ArtifactStore(tmp_path, url)


def test_another_machine_finds_an_artifact_by_digest(tmp_path):
    made, other = made_on(ArtifactStore(tmp_path / "one", URL)), ArtifactStore(tmp_path / "two", URL)
    artifact = other.find_digest(made.digest[:8])
    assert artifact is not None and artifact.digest == made.digest and artifact.path.is_relative_to(tmp_path / "two")
    assert other.find_digest("0" * 8) is None and other.find_digest("tiny/qwen3-vl") is None


def shows(images: ImageStore, *colors: str) -> Callable[[Path], None]:
    """Return a function that writes a batch whose sample shows images of these colors."""

    def fill(folder: Path) -> None:
        refs = tuple(images.put(encode_png(Image.new("RGB", (8, 8), color))) for color in colors)
        ids, numbers = np.zeros(2, np.int32), np.zeros(2, np.float32)
        write_batch(folder, [Sample("s", "g", "t", ids, ids > 0, numbers, ids, numbers, 0.0, refs)])
        write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    return fill


def test_images_are_sent_as_one_archive_per_artifact(tmp_path, unsteady, monkeypatch):
    one, two = ArtifactStore(tmp_path / "one", URL), ArtifactStore(tmp_path / "two", URL)
    colors = [f"#0000{number:02x}" for number in range(40)]
    one.write("stage", "f1", shows(ImageStore(one.images), *colors))
    one.write("stage", "f2", shows(ImageStore(one.images), *colors[:3], "#ff0000"))
    archives = [name for what, name in unsteady.asked if what == "put" and name.endswith(".zip")]
    assert len(archives) == 2

    unsteady.asked.clear()
    monkeypatch.setattr(image_archive, "PART_BYTES", 1000)
    for fingerprint, fetched in (("f1", 40), ("f2", 41)):
        artifact = two.find("stage", fingerprint)
        assert artifact is not None and len(list(two.images.glob("??/*.png"))) == fetched
        shown = [ref for sample in read_batch(artifact.path) for ref in sample.images]
        assert [ImageStore(two.images).read(ref) for ref in shown] == [
            ImageStore(one.images).read(ref) for ref in shown
        ]
    assert not list(ImageStore(two.images).unfinished.iterdir())
    one.write("stage", "f3", shows(ImageStore(one.images), *colors[:3]))
    unsteady.asked.clear()
    assert two.find("stage", "f3") is not None
    assert not [name for _, name in unsteady.asked if name.endswith(".zip")]  # the machine has all images already


def test_deleting_an_artifact_keeps_images_of_others(tmp_path, unsteady):
    one = ArtifactStore(tmp_path / "one", URL, say=lambda line: None)
    for fingerprint in ("f1", "f2", "f3"):
        one.write("stage", fingerprint, shows(ImageStore(one.images), "red"))
    one.discard("stage", "f1")
    with one.lock("stage", "f2"):
        one.set_aside("stage", "f2")
    assert len([path for path in unsteady.store if path.endswith(".zip")]) == 1
    two = ArtifactStore(tmp_path / "two", URL)
    assert two.find("stage", "f3") is not None and len(list(two.images.glob("??/*.png"))) == 1
    assert two.find("stage", "f1") is None and two.find("stage", "f2") is None


@pytest.mark.parametrize("harm", ["bytes", "name", "bomb", "no zip", "password"])
def test_rejects_damaged_image_archive(tmp_path, unsteady, harm):
    one, two = ArtifactStore(tmp_path / "one", URL), ArtifactStore(tmp_path / "two", URL)
    one.write("stage", "f1", shows(ImageStore(one.images), "red"))
    one.send_waiting()
    [name] = [path for path in unsteady.store if path.endswith(".zip")]
    image = next(one.images.glob("??/*.png"))
    changed = BytesIO()
    with zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED if harm == "bomb" else zipfile.ZIP_STORED) as pack:
        pack.writestr("../../x.png" if harm == "name" else image.name, b"1" if harm == "bytes" else image.read_bytes())
    content = b"PK" if harm == "no zip" else changed.getvalue()
    if harm == "password":  # set the encryption flag in the file's header and in the directory
        marked = bytearray(content)
        marked[6], marked[content.index(b"PK\1\2") + 8] = 1, 1
        content = bytes(marked)
    unsteady().pipe_file(name, content)
    [path] = [path for path in unsteady.store if path.endswith(MARKER)]
    marker = RemoteMarker.model_validate_json(unsteady().cat_file(path)).model_copy(update={"images": len(content)})
    unsteady().pipe_file(path, marker.model_dump_json().encode())
    with refused("remote_copy_damaged", ".zip"):
        two.find("stage", "f1")
    assert not two.home("stage", "f1").exists() and not list(two.images.glob("??/*"))


def test_missing_image_is_reported_and_the_others_are_sent(tmp_path):
    messages: list[str] = []
    one, two = ArtifactStore(tmp_path / "one", URL, say=messages.append), ArtifactStore(tmp_path / "two", URL)
    images = ImageStore(one.images)
    gone = images.path(images.put(encode_png(Image.new("RGB", (8, 8), "red"))))

    def fill(folder: Path) -> None:
        shows(images, "red", "blue")(folder)
        gone.unlink()

    made_on(one, fill)
    assert "1 images" in messages[0] and gone.name[:12] in messages[0]
    assert two.find("stage", "f1") is not None and len(list(two.images.glob("??/*.png"))) == 1
