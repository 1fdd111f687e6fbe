"""Answers of the policy server to many robots at once, compared with its policy alone."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from websockets.asyncio.client import connect

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.server.metrics import PolicyServerMetrics
from armature.components.robots.server.server import PolicyServer
from armature.components.robots.server.settings import PolicyServerSettings
from armature.components.robots.server.wire import Message, ObservationFormat, pack
from benchmarks.episodes import tiny_policy
from benchmarks.processor import CAMERA, CAMERAS, STATES, TASK
from benchmarks.table import Row, pair, seconds

CLIENTS, ANSWERS, ROUNDS, BATCH = 50, 4, 5, 8
STATE = "observation.state"


def measure() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(1, spawned) as robots:
        policy = tiny_policy(Path(scratch))
        with _serving(policy) as url:
            robots.submit(play, url, CLIENTS, 1).result()
            many = [
                (_alone(policy, CLIENTS), robots.submit(play, url, CLIENTS, ANSWERS).result()) for _ in range(ROUNDS)
            ]
            one = [(_alone(policy, 1), robots.submit(play, url, 1, ANSWERS * 5).result()) for _ in range(ROUNDS)]
    torch.set_num_threads(threads)
    note = f"a tiny MolmoAct2, two images of {CAMERA} x {CAMERA}, {BATCH} at once, {os.cpu_count()} cores"
    baseline = f"{CLIENTS} answers of the policy alone"
    alone, times = [1e3 * each for each, _ in many], [each for _, (each, _) in many]
    middle, tail = (pair([_percentile(each, share) for each in times], alone) for share in (50, 99))
    rates = pair([CLIENTS * ANSWERS / took for _, (_, took) in many], [CLIENTS / each for each, _ in many])
    single = pair([_percentile(each, 50) for _, (each, _) in one], [1e3 * each for each, _ in one])
    named = [
        (f"latency of {CLIENTS} clients at once, p50", middle, baseline, "ms", "lower"),
        (f"latency of {CLIENTS} clients at once, p99", tail, baseline, "ms", "lower"),
        (f"answers to {CLIENTS} clients", rates, "the policy alone", "/s", "higher"),
        ("latency of one client, p50", single, "an answer of the policy alone", "ms", "lower"),
    ]
    return [
        Row(what, result.ours, result.baseline, against, unit, better, note, result.spread)
        for what, result, against, unit, better in named
    ]


def play(url: str, clients: int, answers: int) -> tuple[list[float], float]:
    """Let clients ask a server; each client asks again as soon as it has an answer. Return the seconds of each answer,
    and the seconds that all answers took together."""
    return asyncio.run(_play(url, clients, answers))


async def _play(url: str, clients: int, answers: int) -> tuple[list[float], float]:
    barrier = asyncio.Barrier(clients + 1)

    async def robot(number: int) -> list[float]:
        times = []
        frame = pack(_fields(number))
        async with connect(url, compression=None, max_size=None, proxy=None, open_timeout=60) as connection:
            await connection.recv()
            await barrier.wait()
            for _ in range(answers):
                began = time.perf_counter()
                await connection.send(frame)
                if isinstance(answer := await connection.recv(), str):
                    raise RuntimeError(answer)
                times.append(time.perf_counter() - began)
        return times

    robots = [asyncio.ensure_future(robot(number)) for number in range(clients)]
    await barrier.wait()
    began = time.perf_counter()
    times = [each for result in await asyncio.gather(*robots) for each in result]
    return times, time.perf_counter() - began


@contextmanager
def _serving(policy: MolmoAct2Policy) -> Iterator[str]:
    """Run a policy server in a thread during the block. Yield its address."""
    url, running = Future[str](), Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]]()
    form = ObservationFormat.of(policy.cameras, policy.state_dimensions, STATE)
    settings = PolicyServerSettings(port=0, batch=BATCH)

    async def serve() -> None:
        server = PolicyServer(policy, form, settings, None, {}, PolicyServerMetrics())
        task = asyncio.ensure_future(server.run(url.set_result))
        running.set_result((asyncio.get_running_loop(), task))
        with suppress(asyncio.CancelledError):
            await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, task = running.result()
    try:
        yield url.result(60)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _alone(policy: MolmoAct2Policy, count: int) -> float:
    seen = [_observation(_fields(number)) for number in range(count)]
    return seconds(
        lambda: [policy.predict(seen[at : at + BATCH], range(count)[at : at + BATCH]) for at in range(0, count, BATCH)]
    )


def _fields(number: int) -> Message:
    random = np.random.default_rng(number)
    images = {name: random.integers(0, 256, (CAMERA, CAMERA, 3), np.uint8) for name in CAMERAS}
    return {**images, STATE: random.uniform(-1, 1, STATES).astype(np.float32), "prompt": TASK}


def _observation(fields: Message) -> RobotObservation:
    return RobotObservation({name: fields[name] for name in CAMERAS}, fields[STATE], TASK)


def _percentile(times: Sequence[float], share: int) -> float:
    """Return a percentile of times in seconds, converted to milliseconds."""
    return 1e3 * statistics.quantiles(times, n=100, method="inclusive")[share - 1]
