"""Jobs of a key stay on one worker, failed jobs are retried, and other errors end the run."""

from __future__ import annotations

import threading
import time

import pytest

from armature.components.machine.workers.channel import WorkerError
from armature.components.machine.workers.pool import StickyQueue, WorkerPool
from armature.components.machine.workers.process import WorkerProcess

from .calls import call

Job = tuple[str, int]
JOBS = [("a", i) for i in range(4)] + [("b", i) for i in range(4)]


def key(job: Job) -> str:
    return job[0]


def pool(count: int) -> WorkerPool[WorkerProcess]:
    return WorkerPool(lambda: WorkerProcess("tests.machine.workers.misbehaving", timeout=60.0), count)


def test_jobs_of_a_key_stay_together_and_failures_are_retried() -> None:
    tries: dict[Job, int] = {}
    worked: dict[int, list[Job]] = {}
    lock, both = threading.Lock(), threading.Barrier(2, timeout=20)

    def work(worker: WorkerProcess, job: Job) -> tuple[Job, int]:
        with lock:
            tries[job] = tries.get(job, 0) + 1
            worked.setdefault(id(worker), []).append(job)
        if tries[job] == 1:
            both.wait()  # the two take turns
        if job == ("a", 2) and tries[job] < 3:
            call(worker, "leave", 1)
        return job, call(worker, "echo", job[1])

    with pool(2) as workers:
        done: list[tuple[Job, int]] = []
        workers.run(JOBS, work, key, done.append, attempts=3)
        assert dict(done) == {job: job[1] for job in JOBS} and len(done) == len(JOBS)
        assert tries["a", 2] == 3 and sum(tries.values()) == 10
        first, second = worked.values()
        assert {key(job) for job in first}.isdisjoint(key(job) for job in second)
        assert [number for _, number in second] == sorted(number for _, number in second)
        assert sorted(worker.starts for worker in workers.workers) == [1, 3]


def test_failed_last_attempt_ends_all_jobs() -> None:
    tried: list[Job] = []
    heard: list[None] = []

    def work(worker: WorkerProcess, job: Job) -> None:
        tried.append(job)
        raise error

    with pool(1) as workers:
        for error, attempts in ((WorkerError("gone"), 2), (LookupError("lost"), 1)):
            tried.clear()
            with pytest.raises(type(error)):
                workers.run(JOBS, work, key, heard.append, attempts=2)
            assert tried == [JOBS[0]] * attempts
        workers.run([], work, key, heard.append)
    assert heard == []


def test_result_error_stops_the_work_first() -> None:
    begun: list[Job] = []
    ended: list[Job] = []

    def work(worker: WorkerProcess, job: Job) -> None:
        begun.append(job)
        time.sleep(0.5 * (len(begun) - 1))
        ended.append(job)

    def finished(result: None) -> None:
        raise LookupError

    with pool(1) as workers:
        with pytest.raises(LookupError):
            workers.run(JOBS, work, key, finished)
        assert len(begun) <= 2 and begun == ended
    time.sleep(0.2)
    assert len(begun) <= 2


def test_key_has_its_worker_and_keys_take_turns() -> None:
    with pool(3) as workers:
        keys = ["a", "b", "a", "c", "d", "b", ("d", 1)]
        assert [workers.workers.index(workers.of(each)) for each in keys] == [0, 1, 0, 2, 0, 1, 1]
        assert not any(worker.alive for worker in workers.workers)


def test_new_thread_takes_the_key_with_most_waiting() -> None:
    queue = StickyQueue([*JOBS, ("b", 4)], key)
    assert queue.take(None) == ("b", 0)
    assert queue.take(None) == ("a", 0)
    assert queue.take(None) == ("b", 1)  # four wait there for two, three would for two at a
    assert [queue.take("a") for _ in range(3)] == [("a", 1), ("a", 2), ("a", 3)]
    assert queue.take("a") == ("b", 2)
    queue.clear()
    assert queue.take("b") is None


def test_calls_with_the_same_key_go_to_the_same_worker() -> None:
    queue = StickyQueue(JOBS, key, held=["a", "a"])
    assert queue.take("a") == ("a", 0)
    assert queue.take(None) == ("b", 0)  # three wait for two at a, four for nobody at b
    assert [queue.take("a") for _ in range(4)] == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
    assert [queue.take("b") for _ in range(2)] == [("b", 2), ("b", 3)]
    assert queue.take("a") is None
