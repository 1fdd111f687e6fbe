"""Machines that share a remote store make an artifact one after the other, not at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from armature.components.artifacts import leases
from armature.components.artifacts.leases import Holder
from armature.components.artifacts.store import ArtifactStore
from tests.refusals import refused


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEWAL", 0.02)
    monkeypatch.setattr(leases, "POLL", 0.01)


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], ArtifactStore]:
    """A machine with a store of its own, beside a remote store that all share; what it says is in `said`."""

    def named(name: str) -> ArtifactStore:
        return ArtifactStore(tmp_path / name, str(tmp_path / "remote"), say=said.append)

    said: list[str] = []
    named.said = said  # type: ignore[attr-defined]
    return named


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_machine_at_a_time(machine):
    guard, most, held = Lock(), [], []

    def make(number: int) -> None:
        with machine(f"{number}").lease("stage", "f1"):
            with guard:
                held.append(number)
                most.append(len(held))
            time.sleep(0.01)
            with guard:
                held.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(8)))
    assert most == [1] * 8


def test_the_second_says_whom_it_waits_for_and_comes_after(machine, monkeypatch):
    one, two, order = machine("one"), machine("two"), []

    def second() -> None:
        with two.lease("stage", "f1"):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with one.lease("stage", "f1"):
            waiting = pool.submit(second)
            until(lambda: bool(machine.said))
            order.append("first")
        waiting.result(60)
    assert order == ["first", "second"]
    assert "waits for process" in machine.said[0] and "stage-f1" in machine.said[0]


def killed(store: ArtifactStore) -> None:
    """Leave the lease as a machine does that is switched off."""
    lease = store.lease("stage", "f1")
    lease.__enter__()
    [path] = (store.root.parent / "remote/leases/stage-f1").iterdir()
    as_it_was = path.read_bytes()
    lease.__exit__(None, None, None)
    path.write_bytes(as_it_was)


def test_a_machine_that_is_gone_is_replaced(machine, monkeypatch):
    monkeypatch.setattr(leases, "LEASE", 0.4)
    killed(machine("one"))
    with machine("two").lease("stage", "f1"):
        assert "is gone, taken over" in machine.said[-1]


def test_a_process_that_was_killed_is_replaced_on_its_own_machine_without_waiting(machine):
    killed(machine("one"))
    with machine("one").lease("stage", "f1"):
        assert machine.said == []


def test_a_machine_that_was_replaced_hears_it_at_its_next_checkpoint(machine, monkeypatch, tmp_path):
    one, two = machine("one"), machine("two")
    monkeypatch.setattr(leases, "LEASE", 0.4)
    with one.lease("stage", "f1"):
        monkeypatch.setattr(leases.RemoteLeases, "_write", lambda *_: None)  # it is suspended
        with two.lease("stage", "f1"):
            until(lambda: "has taken over" in machine.said[-1])
            with refused("stage_taken_over", "leases/stage-f1"):
                one.send_checkpoint("stage", "f1", one.workspace("stage", "f1") / "step-000001")


class WithoutConditions(MemoryFileSystem):
    """A store that takes the condition of a write and does not look at it."""

    protocol = "unconditional"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("unconditional:/"))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value, **kwargs)


class LooksFirst(WithoutConditions):
    """A store with nothing but fsspec's own way, which another machine can come between."""

    pipe_file = AbstractFileSystem.pipe_file


@pytest.fixture(params=[WithoutConditions, LooksFirst])
def unconditional(request: pytest.FixtureRequest) -> Iterator[str]:
    fsspec.register_implementation("unconditional", request.param, clobber=True)
    WithoutConditions.store.clear()
    yield "unconditional://bucket"
    WithoutConditions.store.clear()


def test_a_store_without_conditional_writes_is_named(tmp_path, unconditional):
    said: list[str] = []
    store = ArtifactStore(tmp_path, unconditional, say=said.append)
    with store.lease("stage", "f1"), store.lease("stage", "f2"):
        pass
    assert len(said) == 1 and "has no conditional writes" in said[0]


def test_what_cannot_be_read_is_a_holder_until_it_has_not_changed_for_long(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(leases, "LEASE", 0.4)
    folder = tmp_path / "remote/leases/stage-f1"
    folder.mkdir(parents=True)
    (folder / "000007").write_text("{")
    with machine("one").lease("stage", "f1"):
        assert "another machine is gone" in machine.said[-1]
    assert Holder.model_validate_json((folder / "000008").read_bytes()).released
