"""Values over a socket: JSON, and arrays as their bytes."""

from __future__ import annotations

import json
import math
import re
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MOST_BYTES = 2**30
"""Of a document, and of an array in it."""

_LENGTH = struct.Struct("<Q")
_ARRAY = "$array"
_NUMBERS = re.compile(r"[<>|][biuf][1248]")


def encoded(value: Any) -> bytes:
    """The length of a JSON document, the document, and the bytes of the arrays in it; tuples become lists.

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
    """What `encoded` was given.

    Raises:
        EOFError: it is cut off.
        ValueError, TypeError: it is not what `encoded` gives.
    """
    rest = memoryview(data)

    def exactly(count: int) -> bytearray:
        nonlocal rest
        if count > len(rest):
            raise EOFError
        part, rest = bytearray(rest[:count]), rest[count:]
        return part

    return _value(exactly)


class Channel:
    """Sends and receives what `encoded` gives. The other side is not trusted."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._until: float | None = None

    def send(self, value: bytes, timeout: float | None = None) -> None:
        """Raises TimeoutError if the other side does not take it, OSError if it has gone."""
        self._stream.settimeout(timeout)
        self._stream.sendall(value)

    def receive(self, timeout: float | None = None) -> Any:
        """
        Raises:
            TimeoutError: the whole of it was not there in `timeout` seconds.
            EOFError, OSError: the other side has gone.
            ValueError, TypeError: it is not what `encoded` gives.
        """
        self._until = None if timeout is None else time.monotonic() + timeout
        return _value(self._exactly)

    def close(self) -> None:
        self._stream.close()

    def _exactly(self, count: int) -> bytearray:
        if count > MOST_BYTES:
            raise ValueError(f"{count} bytes, more than {MOST_BYTES}")
        received = bytearray(count)
        rest = memoryview(received)
        while rest:
            left = None if self._until is None else self._until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._stream.settimeout(left)
            size = self._stream.recv_into(rest)
            if not size:
                raise EOFError
            rest = rest[size:]
        return received


def _value(exactly: Callable[[int], bytearray]) -> Any:
    """Read by `exactly`, which gives so many of the next bytes."""

    def filled(document: dict[str, Any]) -> Any:
        """Called in the order of the document, which is that of the arrays behind it."""
        if _ARRAY not in document:
            return document
        name, shape = document[_ARRAY]
        if not _NUMBERS.fullmatch(name) or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError(f"an array of {name!r:.40} and shape {shape!r:.100}")
        dtype = np.dtype(name)
        return np.ndarray(tuple(shape), dtype, exactly(math.prod(shape) * dtype.itemsize))

    (length,) = _LENGTH.unpack(exactly(_LENGTH.size))
    try:
        return json.loads(exactly(length), object_hook=filled)
    except RecursionError as error:
        raise ValueError("a document of too many levels") from error
