"""Checkpoints in a remote store: lost machines are replaced, and several machines make the same artifact at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from pydantic import BaseModel

from armature.components.artifacts import remote_attempts, remote_folder
from armature.components.artifacts.remote_attempts import ATTEMPT_FILE, NEWEST, NewestCheckpoint, RemoteAttempt
from armature.components.artifacts.remote_folder import RemoteFiles
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import stages
from armature.components.configuration.stages import run_stage
from armature.components.contracts.errors import DataError
from armature.components.contracts.stages import Stage, StageContext
from tests.artifacts.filling import fill_with
from tests.builders import make_machine
from tests.refusals import refused


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_attempts, "POLL_S", 0.01)
    monkeypatch.setattr(remote_folder, "RETRY_WAITS_S", ())


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """The remote folder with the attempts of all machines to make the artifact stage/f1."""
    return tmp_path / "remote/attempts/stage-f1"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], ArtifactStore]:
    """Return a function that returns the local store of the machine with a given name. All machines share one remote
    store. The function's attribute `messages` collects the stores' messages."""

    def named(name: str) -> ArtifactStore:
        return ArtifactStore(tmp_path / name, str(tmp_path / "remote"), say=messages.append)

    messages: list[str] = []
    named.messages = messages  # type: ignore[attr-defined]
    return named


def workspace(store: ArtifactStore) -> Path:
    return store.workspace("stage", "f1")


def begin(store: ArtifactStore, afresh: bool = False) -> int:
    """Begin an attempt to make the artifact stage/f1, and return the number of the attempt."""
    store.begin("stage", "f1", afresh)
    return RemoteAttempt.model_validate_json((workspace(store) / ATTEMPT_FILE).read_bytes()).number


def offer(store: ArtifactStore, step: int) -> Path:
    """Announce the checkpoint of `step` to the store before it is complete, and return the checkpoint's folder."""
    (workspace(store) / "history.jsonl").write_text(f"{step}\n")
    folder = workspace(store) / f"trainer/checkpoints/step-{step:06d}"
    store.send_checkpoint("stage", "f1", folder, workspace(store) / "best")
    return folder


def complete(folder: Path, content: str = "") -> None:
    new = folder.with_name(".new")
    (new / "tensors").mkdir(parents=True)
    (new / "tensors/0").write_text(content or folder.name)
    (new / "tensors/frozen").write_text("frozen")
    new.rename(folder)


def save(store: ArtifactStore, step: int, content: str = "") -> None:
    """Write the checkpoint of `step` and wait until the store has sent it."""
    complete(offer(store, step), content)
    store._senders["stage-f1"].join()


def here(store: ArtifactStore) -> dict[str, str]:
    """Return the content of each checkpoint in the store's local workspace, by folder name."""
    return {path.name: (path / "tensors/0").read_text() for path in workspace(store).glob("trainer/checkpoints/step-*")}


def test_another_machine_resumes_from_the_last_complete_checkpoint(machine, remote):
    one, two = machine("one"), machine("two")
    assert begin(one) == 1
    (workspace(one) / "best/step-000001").mkdir(parents=True)
    (workspace(one) / "best/step-000001/weights").write_text("best")
    save(one, 2)
    save(one, 4)
    offer(one, 6)
    assert begin(two) == 2
    assert here(two) == {"step-000004": "step-000004"}
    assert (workspace(two) / "best/step-000001/weights").read_text() == "best"
    assert (workspace(two) / "history.jsonl").read_text() == "4\n"
    assert "process" in machine.messages[-2] and "has begun the same work (stage-f1)" in machine.messages[-2]
    one._senders["stage-f1"]._ended = True


def test_unchanged_files_are_sent_once_and_old_ones_deleted(machine, remote):
    one = machine("one")
    begin(one)
    save(one, 2)
    before = {path.name: path.stat().st_ino for path in (remote / "000001").iterdir() if path.name != NEWEST}
    save(one, 4)
    after = {path.name: path.stat().st_ino for path in (remote / "000001").iterdir() if path.name != NEWEST}
    assert len(before) == len(after) == 3  # tensors/0, tensors/frozen, history.jsonl
    assert len(before.items() & after.items()) == 1


def test_attempts_do_not_overwrite_checkpoints_of_others(machine, remote):
    """A machine that was cut off returns with fewer steps than the machine that replaced it."""
    one, two = machine("one"), machine("two")
    begin(one)
    save(one, 2, "one")
    begin(two)
    save(two, 8, "two")
    save(one, 4, "one, late")
    third = machine("third")
    assert begin(third) == 3
    assert here(third) == {"step-000008": "two"}
    assert {path.name for path in remote.iterdir() if path.is_dir()} == {"000001", "000002"}
    save(one, 10, "one, ahead")
    fourth = machine("fourth")
    assert begin(fourth) == 4 and here(fourth) == {"step-000010": "one, ahead"}


def test_simultaneous_attempts_get_different_numbers(machine, remote):
    one = machine("one")
    begin(one)
    save(one, 2)
    stores = [machine(f"{number}") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(begin, stores))
    assert sorted(numbers) == list(range(2, 10))
    assert len({RemoteAttempt.model_validate_json(path.read_bytes()).id for path in remote.glob("*.json")}) == 9
    assert [here(store) for store in stores] == [{"step-000002": "step-000002"}] * 8


def test_checkpoint_replaced_while_fetching_is_fetched_again(machine, monkeypatch):
    one, two, get = machine("one"), machine("two"), RemoteFiles.get
    begin(one)
    save(one, 2)

    def replace_first(self, files):
        with monkeypatch.context() as patched:
            patched.setattr(RemoteFiles, "get", get)
            if not here(one).get("step-000004"):
                save(one, 4)
            get(self, files)

    monkeypatch.setattr(RemoteFiles, "get", replace_first)
    begin(two)
    assert here(two) == {"step-000004": "step-000004"}


def test_restarted_process_continues_its_attempt(machine, remote):
    one = machine("one")
    begin(one)
    save(one, 2)
    before = len(machine.messages)
    again = machine("one")
    assert begin(again) == 1 and machine.messages[before:] == []
    save(again, 4)
    assert [path.name for path in remote.iterdir() if path.is_dir()] == ["000001"]


def test_newer_local_checkpoint_is_kept(machine):
    one, two = machine("one"), machine("two")
    begin(one)
    save(one, 2)
    complete(workspace(two) / "trainer/checkpoints/step-000005")
    begin(two)
    assert here(two) == {"step-000005": "step-000005"}


def test_finish_deletes_checkpoints_and_keeps_numbers(machine, remote):
    one, two = machine("one"), machine("two")
    begin(one)
    save(one, 2)
    begin(two)
    save(two, 4)
    one.write("stage", "f1", fill_with())
    one.finish("stage", "f1")
    assert {path.name for path in remote.iterdir()} == {"000001.json", "000002.json"}


def test_force_ignores_earlier_checkpoints(machine, remote):
    one, two = machine("one"), machine("two")
    begin(one)
    save(one, 4, "before")
    with two.lock("stage", "f1"):
        two.set_aside("stage", "f1")
        assert begin(two, afresh=True) == 2
    assert here(two) == {}
    save(one, 6, "before")  # the first machine does not know of --force
    save(two, 2, "afresh")
    three = machine("three")
    begin(three)
    assert here(three) == {"step-000002": "afresh"}


def test_checkpoint_is_sent_after_earlier_artifacts(machine, remote, monkeypatch, tmp_path):
    one = machine("one")
    begin(one)
    with monkeypatch.context() as patched:
        patched.setattr(ArtifactStore, "_send", lambda *_: None)
        one.write("stage", "f1-00001", fill_with())
    (tmp_path / "remote/stage").write_text("in the way")  # no artifact can be sent
    save(one, 2)
    assert "step-000002 was not sent" in machine.messages[-1] and not (remote / "000001").exists()
    (tmp_path / "remote/stage").unlink()
    save(one, 4)
    assert machine("two").find("stage", "f1-00001") is not None and (remote / "000001" / NEWEST).exists()


def test_scratch_folder_of_a_killed_sender_is_removed(machine):
    one = machine("one")
    assert one.remote is not None
    left = one.remote.state / ".scratch-x"
    (left / "snapshot").mkdir(parents=True)
    (left / "lock").touch()
    with one.lock("stage", "f1"):
        assert not left.exists()


def test_ended_attempt_sends_no_late_checkpoint(machine, remote):
    one = machine("one")
    begin(one)
    save(one, 2)
    late = offer(one, 4)
    one.end_checkpoints("stage", "f1")
    again = machine("one")
    assert begin(again) == 1
    complete(late)
    time.sleep(0.2)  # the sender looks every 10 ms
    assert "step-000002" in (remote / "000001" / NEWEST).read_text()
    save(again, 6)
    assert "step-000006" in (remote / "000001" / NEWEST).read_text()


def test_failed_stage_stops_sending_checkpoints(tmp_path, monkeypatch, remote):
    class Plain(BaseModel):
        pass

    def fails(settings: Plain, inputs: object, folder: Path, context: StageContext) -> NoReturn:
        context.saved(context.workspace / "step-000002", None)  # it never becomes complete
        raise DataError("no")

    monkeypatch.setattr(stages, "STAGES", {"stage": Stage("stage", 1, Plain, (), fails)})
    with refused("invalid_data"):
        run_stage("stage", Plain(), {}, make_machine(store=tmp_path / "one", remote_store=remote))
    assert "checkpoint" not in {thread.name for thread in threading.enumerate()}


HARMFUL = {"climbs": "../../../sly", "absolute": "/sly", "hidden": ".lock", "the workspace itself": "./x"}


@pytest.mark.parametrize("name", HARMFUL.values(), ids=HARMFUL)
def test_rejects_checkpoint_with_file_names_outside_the_workspace(machine, remote, name):
    one, two = machine("one"), machine("two")
    begin(one)
    save(one, 2)
    path = remote / "000001" / NEWEST
    newest = NewestCheckpoint.model_validate_json(path.read_bytes())
    files = {name if file == "history.jsonl" else file: facts for file, facts in newest.files.items()}
    parts = (name.rpartition("/")[0] or name, newest.checkpoint)
    path.write_text(newest.model_copy(update={"files": files, "parts": parts}).model_dump_json())
    (workspace(two) / "mine").touch()
    with refused("unsafe_file_name" if name == "/sly" else "remote_checkpoint_damaged", remote):
        begin(two)
    assert here(two) == {} and (workspace(two) / "mine").exists()


@pytest.mark.parametrize("part", ["", ".", "trainer/..", "none"])
def test_rejects_checkpoint_part_without_files(machine, remote, part):
    one, two = machine("one"), machine("two")
    begin(one)
    save(one, 2)
    path = remote / "000001" / NEWEST
    newest = NewestCheckpoint.model_validate_json(path.read_bytes())
    path.write_text(newest.model_copy(update={"parts": (part, newest.checkpoint)}).model_dump_json())
    with refused("remote_checkpoint_damaged", remote):
        begin(two)
    assert here(two) == {} and (workspace(two) / ATTEMPT_FILE).exists()


@pytest.mark.parametrize("harm", ["bytes", "document", "attempt"])
def test_rejects_damaged_checkpoint_and_leaves_no_files(machine, remote, harm):
    one, two = machine("one"), machine("two")
    begin(one)
    save(one, 2)
    newest = remote / "000001" / NEWEST
    code = "remote_checkpoint_damaged"
    if harm == "bytes":
        [tensors] = [path for path in newest.parent.iterdir() if path.read_bytes() == b"step-000002"]
        tensors.write_bytes(b"STEP-000002")
    else:
        code = "remote_record_unreadable"
        (newest if harm == "document" else remote / "000001.json").write_bytes(b'{"checkpoint"')
    with refused(code, remote):
        begin(two)
    assert here(two) == {} and not (workspace(two) / "history.jsonl").exists()


class WithoutConditions(MemoryFileSystem):
    """A file system that accepts the condition of a conditional write but ignores it."""

    protocol = "unconditional"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("unconditional:/"))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value, **kwargs)


class LooksFirst(WithoutConditions):
    """A file system with fsspec's default for conditional writes: it checks for the file and then writes it, which is
    not atomic."""

    pipe_file = AbstractFileSystem.pipe_file


@pytest.fixture(params=[WithoutConditions, LooksFirst])
def unconditional(request: pytest.FixtureRequest) -> Iterator[str]:
    fsspec.register_implementation("unconditional", request.param, clobber=True)
    WithoutConditions.store.clear()
    yield "unconditional://bucket"
    WithoutConditions.store.clear()


def test_store_without_conditional_writes_prints_one_warning(tmp_path, unconditional):
    messages: list[str] = []
    store = ArtifactStore(tmp_path, unconditional, say=messages.append)
    store.begin("stage", "f1", afresh=False)
    store.begin("stage", "f2", afresh=False)
    assert len(messages) == 1 and "has no conditional writes" in messages[0]
