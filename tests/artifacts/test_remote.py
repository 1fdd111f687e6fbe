"""A remote store that does not answer, for a while or for good: nothing is lost and nothing is taken for a no.

The faults are at the edge: a file system of fsspec that refuses requests as one behind a broken network does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from components.artifacts import remote
from components.artifacts.manifest import write_manifest
from components.artifacts.store import ArtifactStore
from components.contracts.errors import ConfigurationError, DataError

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

    def get_file(self, rpath, lpath, **kwargs):
        self._answer("get", rpath)
        return super().get_file(rpath, lpath, **kwargs)


@pytest.fixture(autouse=True)
def unsteady(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Unsteady]]:
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0), raising=False)
    monkeypatch.setattr(Unsteady, "refusals", 0)
    monkeypatch.setattr(Unsteady, "error", ConnectionError("no route to host"))
    Unsteady.store.clear()
    Unsteady.asked.clear()
    yield Unsteady
    Unsteady.store.clear()


def fill(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "x").write_bytes(b"1")
    (folder / "sub/y").write_bytes(b"2")
    write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})


@pytest.mark.parametrize(
    "error", [ConnectionError("reset"), TimeoutError("slow"), OSError(5, "I/O"), RuntimeError("503")]
)
def test_what_time_heals_is_waited_for_and_said(tmp_path, unsteady, monkeypatch, error):
    monkeypatch.setattr(unsteady, "error", error)
    said: list[str] = []
    monkeypatch.setattr("tqdm.tqdm.write", said.append)
    unsteady.refusals = 2
    made = ArtifactStore(tmp_path / "one", URL).write("stage", "f1", fill)
    unsteady.refusals = 2
    found = ArtifactStore(tmp_path / "two", URL).find("stage", "f1")
    assert found is not None and found.digest == made.digest


def test_each_attempt_is_said(tmp_path, unsteady):
    said: list[str] = []
    unsteady.refusals = 2
    ArtifactStore(tmp_path, URL, say=said.append).write("stage", "f1", fill)
    assert len(said) == 2 and all("does not answer" in line and "no route to host" in line for line in said)


def test_a_push_that_failed_for_good_is_an_error_and_the_next_attempt_makes_up_for_it(tmp_path, unsteady):
    unsteady.refusals = 10**6
    with pytest.raises(DataError, match=r"(?s)remote store cannot be used.*what is finished is kept here"):
        ArtifactStore(tmp_path / "one", URL).write("stage", "f1", fill)
    unsteady.refusals = 0
    made = ArtifactStore(tmp_path / "one", URL).find("stage", "f1")
    found = ArtifactStore(tmp_path / "two", URL).find("stage", "f1")
    assert made is not None and found is not None and found.digest == made.digest
    unsteady.asked.clear()
    ArtifactStore(tmp_path / "one", URL).find("stage", "f1")
    assert unsteady.asked == []  # what is known to be there is not asked for again


def test_no_answer_is_not_a_no(tmp_path, unsteady):
    ArtifactStore(tmp_path / "one", URL).write("stage", "f1", fill)
    unsteady.refusals = 10**6
    with pytest.raises(DataError, match="cannot be used"):
        ArtifactStore(tmp_path / "two", URL).find("stage", "f1")


def test_a_push_that_stopped_half_way_is_not_seen_and_is_completed(tmp_path, unsteady, monkeypatch):
    put = unsteady.put_file

    def stop_at_the_manifest(self, lpath, rpath, **kwargs):
        if rpath.endswith("manifest.json"):
            raise KeyboardInterrupt
        put(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(unsteady, "put_file", stop_at_the_manifest)
    with pytest.raises(KeyboardInterrupt):
        ArtifactStore(tmp_path / "one", URL).write("stage", "f1", fill)
    monkeypatch.setattr(unsteady, "put_file", put)
    assert ArtifactStore(tmp_path / "two", URL).find("stage", "f1") is None
    assert ArtifactStore(tmp_path / "one", URL).find("stage", "f1") is not None
    assert ArtifactStore(tmp_path / "two", URL).find("stage", "f1") is not None


@pytest.mark.parametrize("error", [PermissionError("key"), FileNotFoundError("bucket")])
def test_what_time_does_not_heal_is_not_waited_for(tmp_path, unsteady, monkeypatch, error):
    store = ArtifactStore(tmp_path, URL)
    monkeypatch.setattr(unsteady, "error", error)
    monkeypatch.setattr(unsteady, "info", MemoryFileSystem.info)
    unsteady.refusals = 10**6
    with pytest.raises(DataError, match="cannot be used"):
        store.write("stage", "f1", fill)
    assert len(unsteady.asked) == 1


def test_what_is_no_remote_store_is_said(tmp_path):
    with pytest.raises(ConfigurationError, match=r"remote store(?s:.*)nonsense"):
        ArtifactStore(tmp_path, "nonsense://bucket")
