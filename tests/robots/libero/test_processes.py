"""Simulators in processes: slots are equal, and a crash only affects its own process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.tasks import suite_tasks
from tests.refusals import refused

from .simulated import needs_libero, simulator

pytestmark = [needs_libero, pytest.mark.timeout(600)]

STILL = np.zeros((3, 7), np.float32)


@pytest.fixture(scope="module")
def process() -> Iterator[SimulatorProcess]:
    with SimulatorProcess(simulator(), timeout=300.0) as made:
        yield made


def test_slots_are_equal_and_independent(process: SimulatorProcess) -> None:
    task = suite_tasks("libero_spatial")[0]
    first = process.reset(task, 0, 1)
    second = process.reset(task, 0, 1, slot=1)
    assert all(np.array_equal(image, second.images[name]) for name, image in first.images.items())
    moved = process.step(np.tile(np.float32([1, 0, 0, 0, 0, 0, 1]), (4, 1)), slot=1)
    rested = process.step(STILL, film=True)
    assert (rested.success, rested.steps, len(rested.frames)) == (False, 3, 3)
    assert np.array_equal(rested.frames[0]["observation.images.image"], first.images["observation.images.image"])
    assert moved.frames == [] and moved.steps == 4
    assert not np.array_equal(moved.observation.state, rested.observation.state)


def test_refused_call_keeps_the_process_alive(process: SimulatorProcess) -> None:
    process.reset(suite_tasks("libero_spatial")[0], 0, 1)
    pid = process.worker.pid
    with refused("invalid_action", "libero_spatial"):
        process.step(np.full((1, 7), np.inf, np.float32))
    with refused("simulator_lost", "slot 5"):
        process.step(STILL, slot=5)
    with refused("task_not_scripted", "libero_goal"):
        process.demonstrate(suite_tasks("libero_goal")[0], 0, 0, 0.0, 10)
    assert process.worker.pid == pid and process.step(STILL).steps == 3


def test_killed_process_is_detected_and_restarted(process: SimulatorProcess) -> None:
    task = suite_tasks("libero_spatial")[0]
    before = process.reset(task, 3, 1)
    starts, pid = process.worker.starts, process.worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with refused("worker_ended", -9):
        process.step(STILL)
    with refused("simulator_lost", "slot 0"):
        process.step(STILL)
    after = process.reset(task, 3, 1)
    assert process.worker.starts == starts + 1
    assert all(np.array_equal(image, after.images[name]) for name, image in before.images.items())
    assert np.array_equal(before.state, after.state)


def test_hanging_process_is_ended_at_the_timeout() -> None:
    others = set(psutil.Process().children())
    with SimulatorProcess(simulator(), timeout=0.5) as process:
        began = time.monotonic()
        with refused("worker_timeout", 0.5):
            process.reset(suite_tasks("libero_spatial")[0], 0, 1)  # importing alone takes longer
        assert time.monotonic() - began < 10 and process.worker.pid is None
        assert set(psutil.Process().children()) <= others
