"""A worker in a process, whatever it does: what it costs is its own state, in time, and the next call finds another."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pydantic import TypeAdapter

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.machine.workers.channel import MOST_BYTES, IdleWorkerLost, WorkerError, encoded
from armature.components.machine.workers.process import WorkerProcess
from armature.components.machine.workers.requests import ANYTHING, NOTHING
from armature.components.machine.workers.worker import Worker, make_worker, workers_on
from tests.refusals import refused

from .calls import call, parts

pytestmark = pytest.mark.waits

MODULE = "tests.machine.workers.misbehaving"
MakeWorker = Callable[..., Worker]


@pytest.fixture(scope="module", params=["process", *(["actor"] if find_spec("ray") else [])])
def misbehaving(request: pytest.FixtureRequest) -> MakeWorker:
    """A function that makes a worker: in a process of this machine and, if Ray is installed, also on a node of a
    cluster."""
    place = None if request.param == "process" else request.getfixturevalue("cluster")

    def make(timeout: float = 60.0, module: str = MODULE, most_bytes: int = MOST_BYTES, **settings: Any) -> Worker:
        with workers_on(place):
            return make_worker(module, settings, timeout=timeout, most_bytes=most_bytes)

    return make


@pytest.fixture(scope="module")
def worker(misbehaving: MakeWorker) -> Iterator[Worker]:
    with misbehaving() as made:
        yield made


def gone(pid: int, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and type(one) is type(other)


def test_worker_data_round_trip(worker: Worker) -> None:
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 256, (2, 3, 3), dtype=np.uint8),
        rng.normal(size=(4, 7)).astype(np.float32),
        np.asfortranarray(rng.normal(size=(3, 5)))[::2],
        np.array([np.nan, np.inf, -0.0], np.float16),
        np.array(7, np.int64),
        np.zeros((0, 7), np.float32),
        np.array([True, False]),
        np.arange(3, dtype=">i4"),
    ]
    value = {"arrays": arrays, "more": {"nested": [arrays[1], None, True, "ä\n\0", 1e-323, 2**80, 0.1 + 0.2]}, "": []}
    back = call(worker, "echo", value)
    assert same(value, back)
    back["arrays"][0][:] = 0  # a copy of its own, to write to
    assert worker.starts == 1 and worker.alive


def test_unsupported_values_are_not_sent(worker: Worker) -> None:
    call(worker, "echo", 1)
    for value in (Path("a"), np.float32(1), {1, 2}, object()):
        with pytest.raises(TypeError):
            call(worker, "echo", value)
    with pytest.raises(TypeError):
        encoded(b"bytes")
    assert worker.starts == 1 and call(worker, "echo", 2) == 2


def test_worker_state_stays_and_restart_gets_settings(misbehaving: MakeWorker) -> None:
    with misbehaving(start=10) as worker:
        assert not worker.alive and worker.starts == 0
        assert [call(worker, "add", 1) for _ in range(3)] == [11, 12, 13]
        worker.close()
        assert not worker.alive
        assert call(worker, "add", 1) == 11 and worker.starts == 2


def test_closed_worker_cleans_up_and_killed_one_does_not(misbehaving: MakeWorker, tmp_path: Path) -> None:
    for killed in (True, False):
        with misbehaving(5.0, farewell=str(tmp_path / "closed")) as worker:
            call(worker, "echo", 1)
            if killed:
                with refused("worker_timeout"):
                    call(worker, "sleep", 600)
        assert (tmp_path / "closed").exists() is not killed


def test_yielded_parts_arrive_in_time(misbehaving: MakeWorker) -> None:
    with misbehaving(timeout=6.0) as worker:
        began = time.monotonic()
        assert parts(worker, "spread", [1, None, [2]], 2.5, most=3) == [1, None, [2]]
        assert time.monotonic() - began > 6.0
        assert parts(worker, "spread", [], 0.0, most=0) == []


def test_armature_error_reaches_the_caller_and_keeps_the_worker(worker: Worker) -> None:
    before, pid = call(worker, "add", 5), worker.pid
    expected = {
        "ConfigurationError": ConfigurationError,
        "DataError": DataError,
        "StoreError": DataError,
        "OwnError": WorkerError,
    }
    for name, kind in expected.items():
        with pytest.raises(kind) as raised:
            call(worker, "refuse_with", name)
        assert type(raised.value) is kind
        assert (raised.value.what, raised.value.where, raised.value.remedy) == ("not this", "here", "that")
    assert worker.pid == pid and call(worker, "add", 1) == before + 1


@pytest.mark.parametrize("method", ["fail", "spread_and_fail"])
def test_unexpected_error_restarts_the_worker(worker: Worker, method: str) -> None:
    call(worker, "add", 5)
    starts = worker.starts
    with refused("worker_failed", "LookupError: lost"):
        parts(worker, method, most=1)
    assert not worker.alive
    assert call(worker, "add", 1) == 1 and worker.starts == starts + 1


def test_worker_death_has_its_reason(worker: Worker) -> None:
    for request, code in [(("leave", 7), 7), (("leave", 0), 0), (("send_object",), 1)]:
        with refused("worker_ended", f"code {code}", request[0]):
            call(worker, *request)
        assert not worker.alive
    call(worker, "add", 1)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)  # while nobody asks
    with pytest.raises(WorkerError) as raised:
        call(worker, "add", 1)
    assert raised.value.code in ("idle_worker_lost", "worker_ended") and "-9" in raised.value.what
    assert call(worker, "add", 1) == 1


def test_worker_death_during_a_call_is_noticed_at_once(worker: Worker) -> None:
    call(worker, "echo", 1)
    assert worker.pid is not None
    threading.Timer(0.5, os.kill, (worker.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with refused("worker_ended", -9):
        call(worker, "sleep", 50.0)
    assert time.monotonic() - began < 20


def test_hanging_worker_is_killed_with_its_children(misbehaving: MakeWorker) -> None:
    with misbehaving(timeout=5.0) as worker:
        child, pid = call(worker, "start_a_child"), worker.pid
        assert pid is not None
        began = time.monotonic()
        with refused("worker_timeout", "5 s", "sleep"):
            call(worker, "sleep", 600)
        assert time.monotonic() - began < 20
        assert gone(pid) and gone(child)
        assert call(worker, "add", 1) == 1


def test_worker_that_never_starts_is_killed_in_time(misbehaving: MakeWorker) -> None:
    with misbehaving(timeout=0.05) as worker, refused("worker_timeout", "0.05 s", MODULE):
        call(worker, "echo", 1)
    with misbehaving(module="no.such.module") as missing, refused("worker_ended", "code 1", "no.such.module"):
        call(missing, "echo", 1)


def document(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data", [b"\xff" * 8, document(b"\xff{"), document(b"[" * 100_000)], ids=["length", "text", "deep"]
)
def test_garbage_message_ends_the_worker(worker: Worker, data: bytes) -> None:
    with refused("worker_reply_invalid"):
        call(worker, "write", data.hex(), "stay")
    assert not worker.alive and call(worker, "add", 1) == 1


@pytest.mark.parametrize("how", ["python", "c"])
@pytest.mark.parametrize("child", ["return", "raise", "refuse", "exit", "fork"])
def test_returning_forked_child_sends_no_answer(worker: Worker, child: str, how: str) -> None:
    call(worker, "echo", 0)
    before = worker.pid
    for seconds in (0.0, 0.05):
        assert call(worker, "fork", child, seconds, how) == 1
        for number in range(4):
            assert call(worker, "echo", number) == number
            time.sleep(0.02)
    assert worker.pid == before


def test_forks_between_answer_parts_send_nothing(worker: Worker) -> None:
    for _ in range(3):
        assert parts(worker, "fork_between", [1, 2, 3, 4], most=4) == [1, 2, 3, 4]
        assert [call(worker, "echo", number) for number in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("how", ["python", "c"])
def test_child_that_outlives_the_worker_does_not_hide_its_end(worker: Worker, how: str) -> None:
    began = time.monotonic()
    with refused("worker_ended", "code 7"):
        call(worker, "fork_and_leave", how)
    assert time.monotonic() - began < 20


def test_unrequested_answer_is_not_used(worker: Worker) -> None:
    for text in ('[NUMBER, "done", 2]', '[1, "done", 2]', '["done", 2]'):
        assert call(worker, "write_later", text, 0.2) == 1
        time.sleep(0.6)
        starts = worker.starts
        with pytest.raises(IdleWorkerLost):
            call(worker, "add", 1)
        assert call(worker, "add", 1) == 1 and worker.starts == starts + 1
    assert call(worker, "write_later", '[NUMBER, "done", 2]', 0.5) == 1
    assert call(worker, "sleep", 1.0) is None  # The late answer has come meanwhile, and is dropped.


def test_whole_call_has_one_time_limit(misbehaving: MakeWorker) -> None:
    with misbehaving() as worker:
        call(worker, "echo", 1)
        began = time.monotonic()
        with pytest.raises(WorkerError) as raised:
            worker.call("write_slowly", '[NUMBER, "done", 1]', 0.2, reply=NOTHING, timeout=0.7)
        assert 0.6 < time.monotonic() - began < 8 and isinstance(raised.value.__cause__, TimeoutError)
        assert call(worker, "add", 1) == 1


def test_worker_that_reads_nothing_does_not_block(misbehaving: MakeWorker) -> None:
    with misbehaving() as worker:
        call(worker, "deafen")
        time.sleep(0.4)
        began = time.monotonic()
        with pytest.raises(WorkerError) as raised:
            worker.call("echo", "x" * 2**23, reply=ANYTHING, timeout=0.7)
        assert time.monotonic() - began < 8 and isinstance(raised.value.__cause__, TimeoutError)
        assert call(worker, "add", 1) == 1


def test_answer_has_a_size_limit(misbehaving: MakeWorker) -> None:
    with misbehaving(most_bytes=2**16) as worker:
        assert call(worker, "echo", "x" * 2**15) == "x" * 2**15
        for request in (("echo", "x" * 2**16), ("write_endlessly", '[4294967297, "done", 1]')):
            with refused("worker_reply_invalid", 2**16):
                call(worker, *request)
        with refused("worker_reply_invalid", 2**16):
            parts(worker, "spread", ["x" * 2**14] * 8, 0.0, most=8)
        assert call(worker, "add", 1) == 1


def test_too_many_answer_parts_end_the_worker(worker: Worker) -> None:
    for most in (0, 2):
        with refused("worker_reply_invalid"):
            parts(worker, "spread", [1, 2, 3], 0.0, most=most)


def test_malformed_answer_ends_the_worker(worker: Worker) -> None:
    call(worker, "echo", 1)
    with refused("worker_reply_invalid"):
        worker.call("echo", [1, None], reply=TypeAdapter(list[int]))
    assert not worker.alive


def test_pickle_is_not_executed(misbehaving: MakeWorker, tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return os.mkdir, (str(canary),)

    pickled = pickle.dumps(Evil())
    for data in (document(pickled), struct.pack("!i", len(pickled)) + pickled):
        with pytest.raises(WorkerError):
            call(misbehaving(timeout=5.0), "write", data.hex(), "stay")
    assert not canary.exists()


@pytest.mark.parametrize("data", [b"", b"\x05", document(b'[1, "done", 1]')[:-1]], ids=["nothing", "length", "end"])
def test_truncated_answer_is_a_death_or_a_timeout(misbehaving: MakeWorker, data: bytes) -> None:
    with misbehaving(timeout=5.0) as worker:
        call(worker, "echo", 1)
        with refused("worker_ended", "code 0"):
            call(worker, "write", data.hex(), "leave")
        call(worker, "echo", 1)
        began = time.monotonic()
        with refused("worker_timeout", "5 s"):
            call(worker, "write", data.hex(), "stay")
        assert time.monotonic() - began < 20


def test_threads_sharing_a_worker_get_their_answers(worker: Worker) -> None:
    def ask(number: int) -> bool:
        return all(call(worker, "echo", [number, each]) == [number, each] for each in range(50))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(8)))


def test_close_fails_the_call_in_flight(misbehaving: MakeWorker) -> None:
    with misbehaving() as worker:
        call(worker, "echo", 1)
        threading.Timer(0.5, worker.close).start()
        with pytest.raises(WorkerError) as raised:
            call(worker, "sleep", 50.0)
        assert raised.value.code in ("worker_ended", "worker_node_lost")
        assert call(worker, "add", 1) == 1


def test_an_interrupted_call_leaves_no_answer_for_the_next(worker: Worker) -> None:
    call(worker, "echo", 1)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        parts(worker, "spread", [1, 2, 3], 1.0, most=3)
    assert call(worker, "echo", "mine") == "mine"


def test_worker_and_children_end_with_their_parent() -> None:
    code = (
        "import os, signal\n"
        "from armature.components.machine.workers.process import WorkerProcess\n"
        "from armature.components.machine.workers.requests import ANYTHING\n"
        f"worker = WorkerProcess({MODULE!r}, timeout=60.0)\n"
        "print(worker.call('start_a_child', reply=ANYTHING), worker.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False).stdout
    assert all(gone(int(pid)) for pid in out.split()) and len(out.split()) == 2


def test_worker_of_another_environment_imports_its_packages_first(monkeypatch, tmp_path):
    (tmp_path / "numpy.py").write_text("raise SystemExit")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with WorkerProcess(MODULE, {"start": 2}, timeout=60.0, python=sys.executable) as worker:
        assert worker.call("add", 3, reply=ANYTHING) == 5
        assert same(worker.call("echo", np.eye(2), reply=ANYTHING), np.eye(2))
