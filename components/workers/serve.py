"""The worker's side."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import cache
from typing import Any, Protocol

from components.contracts.errors import ArmatureError
from components.workers.channel import Channel, encoded
from components.workers.errors import described


class Handler(Protocol):
    """Its other methods answer requests."""

    def close(self) -> None:
        """The other side has gone; not called where the process is ended from outside."""


def serve(make: Callable[..., Handler]) -> None:
    """Answer requests by the methods of a handler, which the first one makes, until the other side goes.

    What a generator yields is sent at once. An ArmatureError is the caller's affair; after any other error the process
    is ended from outside, since nobody knows what it left behind.
    """
    os.dup2(2, 1)  # simulators print
    with socket.socket(fileno=int(sys.argv[1])) as stream, ExitStack() as stack, suppress(EOFError, OSError):
        channel = Channel(stream)
        settings = channel.receive()
        channel.send(encoded(os.getpid()))
        handler = cache(lambda: stack.enter_context(closing(make(**settings))))
        while True:
            method, arguments = channel.receive()
            for answer in _answers(handler, method, arguments):
                channel.send(encoded(answer))


def _answers(handler: Callable[[], Handler], method: str, arguments: list[Any]) -> Iterator[tuple[str, Any]]:
    """("done", value); or ("part", value) of whatever is yielded, then "end"; or at any time "refused" or "failed"."""
    try:
        answer = getattr(handler(), method)(*arguments)
        if isinstance(answer, Iterator):
            for part in answer:
                yield "part", part
            yield "end", None
        else:
            yield "done", answer
    except ArmatureError as error:
        yield "refused", described(error)
    except Exception as error:
        yield "failed", f"{type(error).__name__}: {error}"[:4000]
