"""A remote store that does not answer, for a while or for good: nothing is lost and nothing is taken for a no.

The faults are at the edge: a file system of fsspec that refuses requests as one behind a broken network does.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from armature.components.artifacts import packs, remote_folder
from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.outbox import Outbox
from armature.components.artifacts.store import ArtifactStore
from armature.components.batches.table import read_batch, write_batch
from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import StoreError
from armature.components.contracts.stages import Artifact
from tests.refusals import refused

URL = "unsteady://bucket/prefix"


class Unsteady(MemoryFileSystem):
    """Its next `refusals` requests fail with `error`; its listings are its own, apart from fsspec's memory."""

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
    monkeypatch.setattr(remote_folder, "WAITS", (0.0, 0.0), raising=False)
    monkeypatch.setattr(Unsteady, "refusals", 0)
    monkeypatch.setattr(Unsteady, "error", ConnectionError("no route to host"))
    Unsteady.store.clear()
    Unsteady.asked.clear()
    yield Unsteady
    Unsteady.store.clear()


def made_on(store: ArtifactStore, fill: Callable[[Path], None] | None = None) -> Artifact:
    made = store.write("stage", "f1", fill or filled)
    store.settle()
    return made


def filled(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "x").write_bytes(b"1")
    (folder / "sub/y").write_bytes(b"2")
    write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})


@pytest.mark.parametrize(
    "error", [ConnectionError("reset"), TimeoutError("slow"), OSError(5, "I/O"), RuntimeError("503")]
)
def test_what_time_heals_is_waited_for(tmp_path, unsteady, monkeypatch, error):
    monkeypatch.setattr(unsteady, "error", error)
    unsteady.refusals = 2
    made = made_on(ArtifactStore(tmp_path / "one", URL))
    unsteady.refusals = 2
    found = ArtifactStore(tmp_path / "two", URL).find("stage", "f1")
    assert found is not None and found.digest == made.digest


def test_each_attempt_is_said(tmp_path, unsteady):
    said: list[str] = []
    unsteady.refusals = 2
    made_on(ArtifactStore(tmp_path, URL, say=said.append))
    assert len(said) == 2 and all("does not answer" in line and "no route to host" in line for line in said)


def test_as_long_as_some_files_arrive_the_others_are_tried_again(tmp_path, unsteady, monkeypatch):
    put, attempts = unsteady.put_file, dict.fromkeys((f"{number}" for number in range(8)), 0)

    def lossy(self, lpath, rpath, **kwargs):
        name = rpath.rpartition("/")[2]
        if name in attempts:
            attempts[name] += 1
            if attempts[name] <= int(name):
                raise ConnectionError("reset")
        put(self, lpath, rpath, **kwargs)

    def fill(folder: Path) -> None:
        for name in attempts:
            (folder / name).write_text(name)
        write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    monkeypatch.setattr(unsteady, "put_file", lossy)
    made = made_on(ArtifactStore(tmp_path / "one", URL, say=lambda line: None), fill)
    assert list(attempts.values()) == list(range(1, 9))
    found = ArtifactStore(tmp_path / "two", URL).find("stage", "f1")
    assert found is not None and found.digest == made.digest


def test_a_push_that_failed_for_good_survives_the_process_and_the_next_one_makes_up_for_it(tmp_path, unsteady):
    unsteady.refusals = 10**6
    store = ArtifactStore(tmp_path / "one", URL, say=lambda line: None)
    made = store.write("stage", "f1", filled)
    with refused("remote_store_unreachable", URL):
        store.settle()
    unsteady.refusals = 0
    assert ArtifactStore(tmp_path / "two", URL).find("stage", "f1") is None
    later = ArtifactStore(tmp_path / "one", URL)
    with later.lock("another", "f2"):
        later.settle()
    found = ArtifactStore(tmp_path / "two", URL).find("stage", "f1")
    assert found is not None and found.digest == made.digest
    unsteady.asked.clear()
    ArtifactStore(tmp_path / "one", URL).find("stage", "f1")
    assert unsteady.asked == []  # what is known to be there is not asked for again


def test_what_another_process_left_is_sent_in_the_background(tmp_path, unsteady, monkeypatch):
    unsteady.refusals = 10**6
    with refused("remote_store_unreachable"):
        made_on(ArtifactStore(tmp_path / "one", URL, say=lambda line: None))
    unsteady.refusals = 0
    other, deadline = ArtifactStore(tmp_path / "two", URL), time.monotonic() + 20
    with ArtifactStore(tmp_path / "one", URL).lock("another", "f2"):
        while other.find("stage", "f1") is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_no_answer_is_not_a_no(tmp_path, unsteady):
    made_on(ArtifactStore(tmp_path / "one", URL))
    unsteady.refusals = 10**6
    with refused("remote_store_unreachable"):
        ArtifactStore(tmp_path / "two", URL).find("stage", "f1")


def test_a_push_that_stopped_half_way_is_not_seen_and_is_completed(tmp_path, unsteady, monkeypatch):
    put = unsteady.put_file

    def stop_at_the_manifest(self, lpath, rpath, **kwargs):
        if rpath.endswith("manifest.json"):
            raise PermissionError("no more")
        put(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(unsteady, "put_file", stop_at_the_manifest)
    with refused("remote_store_access_denied"):
        made_on(ArtifactStore(tmp_path / "one", URL, say=lambda line: None))
    monkeypatch.setattr(unsteady, "put_file", put)
    other = ArtifactStore(tmp_path / "two", URL)
    assert {name for _, name in unsteady.asked} >= {"x", "y"} and other.find("stage", "f1") is None
    made_on(ArtifactStore(tmp_path / "one", URL))
    assert other.find("stage", "f1") is not None


@pytest.mark.parametrize(
    ("error", "code"),
    [(PermissionError("key"), "remote_store_access_denied"), (FileNotFoundError("bucket"), "remote_store_not_usable")],
)
def test_what_time_does_not_heal_is_not_waited_for(tmp_path, unsteady, monkeypatch, error, code):
    monkeypatch.setattr(unsteady, "error", error)
    monkeypatch.setattr(unsteady, "info", MemoryFileSystem.info)
    monkeypatch.setattr(Outbox, "start", lambda self: None)
    unsteady.refusals = 10**6
    with refused(code, URL, kind=StoreError):
        made_on(ArtifactStore(tmp_path, URL))
    assert sorted(unsteady.asked) == [("put", "x"), ("put", "y")]


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
def test_an_address_that_cannot_be_used_is_said_with_what_it_needs(tmp_path, url, code, package):
    with refused(code, "machine.remote_store", url.lower(), package):
        ArtifactStore(tmp_path, url)


def test_an_artifact_is_found_by_its_digest_on_another_machine(tmp_path):
    made, other = made_on(ArtifactStore(tmp_path / "one", URL)), ArtifactStore(tmp_path / "two", URL)
    found = other.find_digest(made.digest[:8])
    assert found is not None and found.digest == made.digest and found.path.is_relative_to(tmp_path / "two")
    assert other.find_digest("0" * 8) is None and other.find_digest("tiny/qwen3-vl") is None


def shows(images: ImageStore, *colors: str) -> Callable[[Path], None]:
    """Fills a batch whose samples show these."""

    def fill(folder: Path) -> None:
        refs = tuple(images.put(encode_png(Image.new("RGB", (8, 8), color))) for color in colors)
        ids, numbers = np.zeros(2, np.int32), np.zeros(2, np.float32)
        write_batch(folder, [Sample("s", "g", "t", ids, ids > 0, numbers, ids, numbers, 0.0, refs)])
        write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    return fill


def test_the_images_that_tables_refer_to_travel_in_packs_each_once(tmp_path, unsteady, monkeypatch):
    one, two = ArtifactStore(tmp_path / "one", URL), ArtifactStore(tmp_path / "two", URL)
    colors = [f"#0000{number:02x}" for number in range(40)]
    one.write("stage", "f1", shows(ImageStore(one.images), *colors))
    one.settle()
    before = [name for what, name in unsteady.asked if what == "put" and name.endswith(".zip")]
    one.write("stage", "f2", shows(ImageStore(one.images), *colors[:3], "#ff0000"))
    one.settle()
    more = [name for what, name in unsteady.asked if what == "put" and name.endswith(".zip")]
    assert len(before) == 1 and len(more) == 2

    unsteady.asked.clear()
    monkeypatch.setattr(packs, "PACK_BYTES", 1000)  # what comes in one pack is kept in parts
    second = two.find("stage", "f2")
    assert second is not None
    shown = [ref for sample in read_batch(second.path) for ref in sample.images]
    assert [ImageStore(two.images).read(ref) for ref in shown] == [ImageStore(one.images).read(ref) for ref in shown]
    assert len([name for what, name in unsteady.asked if what == "get" and name.endswith(".zip")]) == 2
    unsteady.asked.clear()
    first = two.find("stage", "f1")  # all of its images came with those of f2
    assert first is not None and not [name for _, name in unsteady.asked if name.endswith(".zip")]
    assert len(list(two.images.glob("??/*.png"))) == 41 and not list(ImageStore(two.images).unfinished.iterdir())


def test_a_pack_is_made_again_where_the_remote_has_lost_it(tmp_path, unsteady):
    one = ArtifactStore(tmp_path / "one", URL)
    one.write("stage", "f1", shows(ImageStore(one.images), "red"))
    one.settle()
    unsteady.store.clear()
    later = ArtifactStore(tmp_path / "one", URL)
    later.write("stage", "f2", shows(ImageStore(one.images), "red"))
    later.settle()
    two = ArtifactStore(tmp_path / "two", URL)
    assert two.find("stage", "f2") is not None and len(list(two.images.glob("??/*.png"))) == 1


@pytest.mark.parametrize("harm", ["bytes", "name", "bomb", "no zip"])
def test_a_pack_that_is_damaged_is_refused_and_the_artifact_not_found(tmp_path, unsteady, harm):
    one, two = ArtifactStore(tmp_path / "one", URL), ArtifactStore(tmp_path / "two", URL)
    one.write("stage", "f1", shows(ImageStore(one.images), "red"))
    one.settle()
    [name] = [path for path in unsteady.store if path.endswith(".zip")]
    image = next(one.images.glob("??/*.png"))
    changed = BytesIO()
    with zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED if harm == "bomb" else zipfile.ZIP_STORED) as pack:
        pack.writestr("../../x.png" if harm == "name" else image.name, b"1" if harm == "bytes" else image.read_bytes())
    unsteady().pipe_file(name, b"PK" if harm == "no zip" else changed.getvalue())
    with refused("remote_copy_damaged", ".zip"):
        two.find("stage", "f1")
    assert not two.home("stage", "f1").exists() and not list(two.images.glob("??/*"))


def test_an_image_that_is_gone_is_said_and_the_others_are_sent(tmp_path):
    said: list[str] = []
    one, two = ArtifactStore(tmp_path / "one", URL, say=said.append), ArtifactStore(tmp_path / "two", URL)
    images = ImageStore(one.images)
    gone = images.path(images.put(encode_png(Image.new("RGB", (8, 8), "red"))))

    def fill(folder: Path) -> None:
        shows(images, "red", "blue")(folder)
        gone.unlink()

    made_on(one, fill)
    assert "1 images less" in said[0] and gone.name[:12] in said[0]
    assert two.find("stage", "f1") is not None and len(list(two.images.glob("??/*.png"))) == 1


def checkpoint(store: ArtifactStore, step: int) -> Path:
    """One of `step` steps, begun and told of, and not complete."""
    workspace = store.workspace("stage", "f1")
    (workspace / "history.jsonl").write_text(f"{step}\n")
    folder = workspace / f"trainer/checkpoints/step-{step:06d}"
    store.send_checkpoint("stage", "f1", folder, workspace / "best")
    return folder


def complete(folder: Path) -> None:
    new = folder.with_name(".new")
    (new / "tensors").mkdir(parents=True)
    (new / "tensors/0").write_text(folder.name)
    new.rename(folder)


def test_another_machine_has_the_last_complete_checkpoint(tmp_path, unsteady):
    one, two = ArtifactStore(tmp_path / "one", URL), ArtifactStore(tmp_path / "two", URL)
    two.fetch_checkpoint("stage", "f1")
    (one.workspace("stage", "f1") / "best/step-000001").mkdir(parents=True)
    (one.workspace("stage", "f1") / "best/step-000001/weights").write_text("best")
    complete(checkpoint(one, 2))
    one.settle()
    complete(checkpoint(one, 4))
    one.settle()
    checkpoint(one, 6)
    one.settle()
    two.fetch_checkpoint("stage", "f1")
    workspace = two.workspace("stage", "f1")
    assert [path.name for path in workspace.glob("trainer/checkpoints/*")] == ["step-000004"]
    assert (workspace / "trainer/checkpoints/step-000004/tensors/0").read_text() == "step-000004"
    assert (workspace / "best/step-000001/weights").read_text() == "best"
    assert (workspace / "history.jsonl").read_text() == "4\n"
    assert not [path for path in unsteady.store if "step-000002" in path]
    complete(workspace / "trainer/checkpoints/step-000005")
    (workspace / "history.jsonl").write_text("5\n")
    two.fetch_checkpoint("stage", "f1")  # what is newer here stays
    assert (workspace / "history.jsonl").read_text() == "5\n"
    late = ArtifactStore(tmp_path / "late", URL)
    complete(checkpoint(late, 3))
    late.settle()  # of a machine that was gone and has come back
    assert [path for path in unsteady.store if "step-000004" in path]

    made_on(one)
    one.finish("stage", "f1")
    assert not [path for path in unsteady.store if "/workspaces/" in path]


def test_a_checkpoint_is_sent_after_the_artifacts_that_were_made_before_it(tmp_path, unsteady):
    store = ArtifactStore(tmp_path, URL, say=lambda line: None)
    unsteady.refusals = 10**6
    store.write("stage", "f2", filled)
    complete(checkpoint(store, 2))
    with refused("remote_store_unreachable"):
        store.settle()
    unsteady.refusals = 0
    unsteady.asked.clear()
    store.settle()
    sent = [name for what, name in unsteady.asked if what in ("put", "write")]
    assert sent.index("manifest.json") < sent.index("newest.json") and sent[-1] == "newest.json"


def test_what_a_killed_process_was_sending_is_removed_and_sent_again(tmp_path, unsteady):
    store = ArtifactStore(tmp_path / "one", URL)
    complete(checkpoint(store, 2))
    assert store.remote is not None
    left = store.remote.scratch / "x/trainer"
    left.mkdir(parents=True)
    store.settle()
    assert not left.exists()
    assert [path for path in unsteady.store if path.endswith("newest.json")]


@pytest.mark.parametrize("harm", ["bytes", "name"])
def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(tmp_path, unsteady, harm):
    one, two = ArtifactStore(tmp_path / "one", URL), ArtifactStore(tmp_path / "two", URL)
    complete(checkpoint(one, 2))
    one.settle()
    [newest] = [path for path in unsteady.store if path.endswith("newest.json")]
    [tensors] = [path for path in unsteady.store if path.endswith("tensors/0")]
    if harm == "name":
        unsteady().pipe_file(newest, unsteady().cat_file(newest).replace(b"history.jsonl", b"../../../sly"))
    else:
        unsteady().pipe_file(tensors, b"other")
    with refused("remote_checkpoint_damaged"):
        two.fetch_checkpoint("stage", "f1")
    assert not list(two.workspace("stage", "f1").iterdir())
