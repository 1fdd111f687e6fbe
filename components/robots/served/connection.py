"""vla-eval's protocol on the side of the model server: a benchmark plays, and asks for each action.

The benchmark opens a websocket. Messages are MessagePack maps {type, payload, seq, timestamp}: `hello` from both sides,
then for each episode `episode_start`, `observation` and `action` in turns, and `episode_end` with the result. Arrays
are maps {"__ndarray__": true, ...}, images {"__image__": true, ...} with an encoded PNG or JPEG. This is version 1 of
the protocol, in vla-eval 0.8. Nothing is unpickled.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection

from armature.components.artifacts.images import decode
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.robots import RobotObservation
from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.evaluation.robot import refuse_disagreement
from armature.components.robots.libero.processes import ChunkResult
from armature.components.robots.served.settings import ServedBenchmarkSettings
from armature.components.robots.server.client import TOO_LARGE
from armature.components.robots.server.wire import ARRAY, Message, kind, sent_by, unpack, value_of

HELLO, START, END, ERROR = "hello", "episode_start", "episode_end", "error"
OBSERVATION, ACTION = "observation", "action"
VERSION = 1
_PROTOCOL = (
    f"use a benchmark that sends images, a state and the task in version {VERSION} of vla-eval's protocol; "
    "some send a state only with benchmark.params.send_state = true"
)
LARGEST_MESSAGE = 2**26
"""Largest message of a benchmark, in bytes."""


@dataclass(frozen=True)
class BenchmarkMessage:
    """A message of a benchmark. number: an answer has the same."""

    type: str
    payload: Message
    number: int


class BenchmarkConnection:
    """Connection to a benchmark, and a `SimulatorClient` for each episode that the benchmark starts.

    A benchmark sends an observation before each action; those inside a chunk are only read for videos.
    """

    def __init__(self, connection: ServerConnection, settings: ServedBenchmarkSettings) -> None:
        self._connection, self._settings = connection, settings
        self._latest: BenchmarkMessage
        self._seen: RobotObservation

    def receive(self) -> BenchmarkMessage | None:
        """Return the next message; None if the benchmark has closed the connection.

        Raises:
            DataError: the message is invalid or too large.
            WorkerError: no message came in time.
        """
        try:
            frame = self._connection.recv(self._settings.timeout_s)
        except TimeoutError as error:
            raise WorkerError(
                f"the benchmark sent nothing for {self._settings.timeout_s:g} s",
                code="benchmark_silent",
                where="benchmark.timeout_s",
                remedy="see the benchmark's log",
            ) from error
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == TOO_LARGE:
                raise _invalid(f"a message has more than {LARGEST_MESSAGE} bytes") from error
            return None
        with sent_by(self._settings.benchmark, _PROTOCOL):
            message = unpack(frame)
        form = {"type": str, "payload": dict, "seq": int}
        if not all(isinstance(message.get(name), each) for name, each in form.items()):
            raise _invalid(f"the message has {', '.join(f'{key} {kind(each)}' for key, each in message.items())}")
        return BenchmarkMessage(message["type"], message["payload"], message["seq"])

    def greet(self, hello: BenchmarkMessage) -> None:
        """Answer the benchmark's `hello`, which says the version of its protocol."""
        if (version := hello.payload.get("protocol_version")) != VERSION:
            raise _invalid(f"the protocol of the benchmark has version {kind(version)}")
        self.answer(hello, HELLO, {"harness_version": "armature", "protocol_version": VERSION})

    def answer(self, message: BenchmarkMessage, type: str, payload: Message) -> None:
        """Answer a message."""
        answer = {"type": type, "payload": payload, "seq": message.number, "timestamp": time.time()}
        with suppress(ConnectionClosed):  # the next `receive` says so
            self._connection.send(msgpack.packb(answer, default=_array))

    def reset(self, *_: object, **__: object) -> RobotObservation:
        """Return the first observation of the episode that the benchmark has started."""
        self._latest = self._next(OBSERVATION)
        return self._observe()

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        """Send the actions one by one, until the benchmark ends the episode.

        Args:
            film: return the images before each action; else images inside a chunk are not read.

        Raises:
            WorkerError: the benchmark is gone, or silent.
            ConfigurationError: its observation does not have the declared cameras, sizes or dimensions.
            DataError: a message is invalid.
        """
        frames = []
        for steps, action in enumerate(actions, start=1):
            if film:
                frames.append(dict(self._observe().images))
            self.answer(self._latest, ACTION, {"actions": action})
            message = self._next(OBSERVATION, END)
            if message.type == END:
                return ChunkResult(self._seen, _success(message.payload), steps, frames, ended=True)
            self._latest = message
        return ChunkResult(self._observe(), False, len(actions), frames)

    def progress(self, slot: int = 0) -> list[Any]:
        """Return nothing: benchmarks do not tell the progress."""
        return []

    def _next(self, *types: str) -> BenchmarkMessage:
        message = self.receive()
        if message is None or message.type in (START, ERROR):  # an exception in the simulator sends no message
            raise WorkerError(
                "the benchmark did not finish an episode", code="benchmark_lost", remedy="see the benchmark's log"
            )
        if message.type not in types:
            raise _invalid(f"a message of type {message.type!r:.40} came, not {' or '.join(types)}")
        return message

    def _observe(self) -> RobotObservation:
        self._seen = read_observation(self._latest.payload, self._settings)
        return self._seen


def read_observation(payload: Message, settings: ServedBenchmarkSettings) -> RobotObservation:
    """Return the payload of an observation as an observation of the policy's features.

    Raises:
        ConfigurationError: it does not have the declared cameras, sizes or dimensions.
        DataError: a field is missing or invalid.
    """
    images, words = payload.get("images"), payload.get("task_description")
    with sent_by(settings.benchmark, _PROTOCOL):
        state = value_of("states", payload.get("states", payload.get("state")))
    if not isinstance(images, dict) or not isinstance(state, np.ndarray) or state.dtype.kind not in "fiu":
        raise _invalid(f"an observation has images {kind(images)} and states {kind(state)}")
    if not isinstance(words, str) or not words:
        raise _invalid(f"the task_description of an observation is {kind(words)}")
    cameras = tuple(name for name in settings.cameras if name in images)
    with sent_by(settings.benchmark, _PROTOCOL):
        pixels = {settings.cameras[name]: _pixels(name, images[name]) for name in cameras}
    size = (settings.resolution, settings.resolution, 3)
    refuse_disagreement(
        "benchmark",
        {"cameras": tuple(settings.cameras), "state_dimensions": (settings.conventions.state_dimensions,)}
        | {f"size of {name}": size for name in cameras},
        f"the observations of {settings.benchmark}",
        {"cameras": cameras or tuple(images), "state_dimensions": state.shape}
        | {f"size of {name}": pixels[settings.cameras[name]].shape for name in cameras},
        remedy="correct benchmark.cameras, resolution and conventions, or change benchmark.params",
    )
    return RobotObservation(pixels, state.astype(np.float32), words)


def _pixels(name: str, value: Any) -> NDArray[np.uint8]:
    if isinstance(value, dict) and "__image__" in value:
        return np.asarray(decode(EncodedImage(value.get("data", b""), f"image/{value.get('format')}")))
    image = value_of(name, value)
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        raise _invalid(f"the image {name!r:.60} is {kind(image)}")
    return image


def _success(payload: Message) -> bool:
    metrics = payload.get("metrics")
    success = metrics.get("success") if isinstance(metrics, dict) else None
    if not isinstance(success, bool | int | float) or success not in (0, 1):
        raise _invalid(f"the result of an episode has the metrics {kind(metrics)}, and its success is {kind(success)}")
    return bool(success)


def _invalid(what: str) -> DataError:
    return DataError(
        what,
        code="benchmark_message_invalid",
        remedy=_PROTOCOL,
    )


def _array(value: Any) -> dict[str, Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be sent")
    return {ARRAY: True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}
