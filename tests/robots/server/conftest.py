"""A policy server in a thread, and messages of robots."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.sync.client import ClientConnection, connect

from armature.components.contracts.robots import RobotObservation, RobotPolicy
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.server.metrics import PolicyServerMetrics
from armature.components.robots.server.server import PolicyServer
from armature.components.robots.server.settings import PolicyServerSettings
from armature.components.robots.server.wire import ObservationFormat
from tests.robots.policies.molmoact2 import released
from tests.robots.server.by_hand import decode, encode

KEY = "the-key-of-the-tests"
FRONT, WRIST = released.CAMERAS
STATE = "observation.state"
FORM = ObservationFormat.of(released.CAMERAS, 8, STATE, previous=(4, 7, 4))


def message(number: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of an observation. `changes` replace fields; None removes a field."""
    rng = np.random.default_rng(number)
    fields: dict[str, Any] = {
        FRONT: rng.integers(0, 256, (40, 50, 3), np.uint8),
        WRIST: rng.integers(0, 256, (28, 28, 3), np.uint8),
        STATE: rng.uniform(-1, 1, 8).astype(np.float32),
        "prompt": ("put the bowl away", "open the top drawer", "wait")[number % 3],
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def observation(fields: dict[str, Any]) -> RobotObservation:
    return RobotObservation({name: fields[name] for name in released.CAMERAS}, fields[STATE], fields["prompt"])


@dataclass
class Running:
    """A running server with its metrics."""

    url: str
    metrics: PolicyServerMetrics

    def connect(self, key: str | None = KEY, **options: Any) -> ClientConnection:
        headers = {"Authorization": f"Api-Key {key}"} if key is not None else {}
        return connect(
            self.url, additional_headers=headers, compression=None, max_size=None, open_timeout=60, **options
        )

    @property
    def waiting(self) -> float | None:
        return self.metrics.registry.get_sample_value("armature_policy_waiting")

    def count(self, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value("armature_policy_requests_total", {"outcome": outcome})
        assert value is not None
        return value


@contextmanager
def running(policy: RobotPolicy, key: str | None = KEY, **settings: Any) -> Iterator[Running]:
    metrics, started, tasks = PolicyServerMetrics(), Future[str](), []

    async def serve() -> None:
        server = PolicyServer(
            policy, FORM, PolicyServerSettings(**{"port": 0, **settings}), key, {"name": "tiny"}, metrics
        )
        tasks.append((asyncio.get_running_loop(), asyncio.current_task()))
        await server.run(started.set_result)

    def work() -> None:
        try:
            asyncio.run(serve())
        except asyncio.CancelledError:
            return
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield Running(started.result(60), metrics)
    finally:
        for loop, task in tasks:
            if thread.is_alive():
                loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        assert not thread.is_alive()


def ask(connection: ClientConnection, fields: dict[str, Any]) -> dict[str, Any]:
    """Send a request and decode the answer with the independent decoder."""
    connection.send(encode(fields))
    frame = connection.recv(60)
    assert isinstance(frame, bytes), frame
    answer: dict[str, Any] = decode(frame)
    return answer


class GatedPolicy:
    """A policy that waits until its gate is open. Its actions are the state, the seed and the length of the task."""

    n_action_steps, action_dimensions, rows_per_pass = 2, 3, 1

    def __init__(self) -> None:
        self.gate, self.begun, self.calls = threading.Event(), 0, list[int]()
        self.gate.set()

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        self.begun += 1
        self.gate.wait(60)
        self.calls.append(len(seeds))
        rows = [[each.state[0], seed, len(each.task)] for each, seed in zip(observations, seeds, strict=True)]
        return np.array([[row, row] for row in rows], np.float32)

    def facts(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def gated() -> Iterator[GatedPolicy]:
    policy = GatedPolicy()
    yield policy
    policy.gate.set()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> MolmoAct2Policy:
    """A tiny MolmoAct2 with random weights."""
    loaded = load_policy(released.write_released(tmp_path_factory.mktemp("served") / "released"), released.KITCHEN)
    return MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=8)


@pytest.fixture(scope="session")
def server(policy: MolmoAct2Policy) -> Iterator[Running]:
    with running(policy, batch=8) as served:
        yield served
