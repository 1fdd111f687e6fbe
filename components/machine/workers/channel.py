"""Transfer of values over a socket, as JSON with the bytes of arrays appended."""

from __future__ import annotations

import json
import math
import os
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import cache
from types import GeneratorType
from typing import Any, Protocol, TypeVar

import numpy as np

from armature.components.contracts.errors import ArmatureError, ConfigurationError, DataError, said
from armature.components.machine.process import ForkGuard

# --- Errors of a worker, and the errors of its handler that are raised unchanged in the caller ---


class WorkerError(ArmatureError):
    """A worker ended, hung, failed or sent an invalid answer, in this call or before it. Its state is lost."""

    code = "worker_failed"


class IdleWorkerLost(WorkerError):
    """A worker was lost between two calls. The second call was not sent and can be repeated."""

    code = "idle_worker_lost"


_KNOWN = {kind.__name__: kind for kind in (ConfigurationError, DataError, WorkerError, IdleWorkerLost)}


def described(error: ArmatureError) -> list[str]:
    """Return an error as data: the nearest error class that the caller knows, the code, and the three parts."""
    kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _KNOWN), WorkerError.__name__)
    return [kind, error.code, error.what, error.where, error.remedy]


def restored(description: Any) -> ArmatureError:
    """Return the error from the data of `described`. Raises ValueError for other data."""
    match description:
        case [str() as kind, str() as code, str() as what, str() as where, str() as remedy]:
            return _KNOWN.get(kind, WorkerError)(what, code=code, where=where, remedy=remedy)
    raise ValueError("an error without its parts")


MOST_BYTES = 2**30
"""Largest size in bytes of all answers to one request; workers may have a smaller limit."""

MOST_TEXT = 2**24
"""Largest size in bytes of an answer's JSON, without arrays. Parsed JSON may take 30 times as much memory."""

_AHEAD, _AT_ONCE = 2**12, 2**20
ReceivedT = TypeVar("ReceivedT", bytes, int)
_LENGTH = struct.Struct("<Q")
_ARRAY = "$array"
_NUMBERS = re.compile(r"[<>|][biuf][1248]")


def encoded(value: Any) -> bytes:
    """Return the length of a JSON document, the document, and the bytes of its arrays. Tuples become lists.

    Raises:
        TypeError: something is neither of JSON nor an array.
    """
    arrays: list[bytes] = []

    def stand_in(each: Any) -> Any:
        if not isinstance(each, np.ndarray):
            raise TypeError(f"a {type(each).__name__} does not travel between processes, only JSON and arrays do")
        arrays.append(each.tobytes())
        return {_ARRAY: [each.dtype.str, each.shape]}

    document = json.dumps(value, default=stand_in).encode()
    return b"".join([_LENGTH.pack(len(document)), document, *arrays])


def decoded(data: bytes) -> Any:
    """Return the value that `encoded` has encoded.

    Raises:
        EOFError: it is cut off.
        ValueError: it is not what `encoded` gives.
    """
    rest = memoryview(data)

    def exactly(count: int) -> bytearray:
        nonlocal rest
        if count > len(rest):
            raise EOFError
        part, rest = bytearray(rest[:count]), rest[count:]
        return part

    return _value(exactly, len(data))


class CallLimits:
    """The seconds and bytes that are left for one call, shared by sending and by all parts of the answer."""

    def __init__(self, seconds: float, most_bytes: int) -> None:
        self._seconds, self._most_bytes, self._bytes = seconds, most_bytes, most_bytes
        self.restart()

    def restart(self) -> None:
        """Restart the time limit. The limit of bytes is not restored."""
        self._until = time.monotonic() + self._seconds

    def seconds(self) -> float:
        """Return the seconds that are left. Raises TimeoutError if there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def take(self, count: int) -> None:
        """Subtract `count` bytes from the limit. Raises ValueError if fewer are left."""
        if count > self._bytes:
            raise ValueError(f"more than {self._most_bytes} bytes")
        self._bytes -= count


class Channel:
    """A socket for values in the form of `encoded`. Without limits, the other side is trusted."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(stream, select.POLLIN)

    def send(self, value: bytes, limits: CallLimits | None = None) -> None:
        """Send encoded bytes. Raises TimeoutError if the other side does not read them, OSError if it has ended."""
        if limits is not None:
            self._stream.settimeout(limits.seconds())
        self._stream.sendall(value)

    def receive(self, limits: CallLimits | None = None) -> Any:
        """Receive one value.

        Raises:
            TimeoutError: the value did not arrive completely in time.
            EOFError, OSError: the other side has ended.
            ValueError: the data does not have the form of `encoded`, or is larger than the limit.
        """

        def exactly(count: int) -> bytearray:
            if limits is not None:
                limits.take(count)
            return self._exactly(count, limits)

        return _value(exactly, None if limits is None else MOST_TEXT)

    def unread(self) -> bytes | None:
        """Return the next byte without consuming it; empty if the other side has ended; None if nothing has arrived."""
        if not self._buffer and self._poll.poll(0):
            try:
                self._buffer += (byte := self._stream.recv(1))
            except OSError:
                return b""
            return byte
        return bytes(self._buffer[:1]) or None

    def close(self) -> None:
        self._stream.close()

    def _exactly(self, count: int, limits: CallLimits | None) -> bytearray:
        """Return the next `count` bytes."""
        buffer = self._buffer
        if count <= _AHEAD:
            while len(buffer) < count:
                buffer += self._received(lambda: self._stream.recv(_AHEAD), limits)
            self._buffer = buffer[count:]
            del buffer[count:]
            return buffer
        received, size = bytearray(min(count, _AT_ONCE)), len(buffer)
        received[:size] = buffer
        buffer.clear()
        while size < count:
            if size == len(received):  # grow with the received data only, because the announced count may be wrong
                received += bytes(min(count - size, size))
            with memoryview(received) as view, view[size:] as rest:
                size += self._received(lambda: self._stream.recv_into(rest), limits)
        return received

    def _received(self, receive: Callable[[], ReceivedT], limits: CallLimits | None) -> ReceivedT:
        if limits is not None:
            self._stream.settimeout(limits.seconds())
        part = receive()
        if not part:
            raise EOFError
        return part


def _value(exactly: Callable[[int], bytearray], most_text: int | None) -> Any:
    """Decode a value; `exactly(n)` returns the next n bytes."""

    def filled(document: dict[str, Any]) -> Any:
        """Read the next array. JSON objects are visited in document order, which is the order of the arrays' bytes."""
        if _ARRAY not in document:
            return document
        name, shape = document[_ARRAY]
        if not _NUMBERS.fullmatch(name) or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError(f"an array of {name!r:.40} and shape {shape!r:.100}")
        dtype = np.dtype(name)
        return np.ndarray(tuple(shape), dtype, exactly(math.prod(shape) * dtype.itemsize))

    (length,) = _LENGTH.unpack(exactly(_LENGTH.size))
    if most_text is not None and length > most_text:
        raise ValueError(f"a document of {length} bytes, more than {most_text}")
    try:
        return json.loads(exactly(length), object_hook=filled)
    except RecursionError as error:
        raise ValueError("a document of too many levels") from error
    except (TypeError, OverflowError) as error:  # of what stands for an array
        raise ValueError(f"an array that cannot be: {error}") from error


# The worker's side.


class Handler(Protocol):
    """The object in a worker's process whose other methods answer requests."""

    def close(self) -> None:
        """Clean up after the caller has ended. It is not called if the process is killed from outside."""


def serve(make: Callable[..., Handler]) -> None:
    """Create a handler at the first request, and answer requests with its methods until the caller ends.

    Each value that a generator yields is sent immediately as a part, and its return value is the reply. An
    ArmatureError is passed to the caller. After any other error the caller ends the process, because its state is
    unknown.

    The handler's code may fork. A forked child does not have the channel, and exits when it would return to this loop.
    """
    os.dup2(2, 1)  # simulators print
    with socket.socket(fileno=int(sys.argv[1])) as stream, ExitStack() as stack, suppress(EOFError, OSError):
        stream.set_inheritable(False)
        os.register_at_fork(after_in_child=stream.close)
        channel, guard = Channel(stream), ForkGuard()
        number, settings = channel.receive(), channel.receive()
        channel.send(encoded([number, "done", os.getpid()]))
        handler = cache(lambda: stack.enter_context(closing(make(**settings))))
        while True:
            number, method, arguments = channel.receive()
            for kind, value in _answers(handler, method, arguments, guard):
                channel.send(encoded([number, kind, value]))


def _answers(
    handler: Callable[[], Handler], method: str, arguments: list[Any], guard: ForkGuard
) -> Iterator[tuple[str, Any]]:
    """Yield ("part", value) for each yielded value, then ("done", value); "refused" or "failed" end it at any time."""
    try:
        with guard:
            answer = getattr(handler(), method)(*arguments)
        if isinstance(answer, GeneratorType):
            while True:
                try:
                    with guard:
                        part = next(answer)
                except StopIteration as end:
                    answer = end.value
                    break
                yield "part", part
        yield "done", answer
    except ArmatureError as error:
        yield "refused", described(error)
    except Exception as error:
        yield "failed", said(error)
