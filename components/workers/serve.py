"""The worker's side."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import cache
from types import GeneratorType
from typing import Any, Protocol

from armature.components.contracts.errors import ArmatureError
from armature.components.contracts.failures import said
from armature.components.process import ForkGuard
from armature.components.workers.channel import Channel, encoded
from armature.components.workers.errors import described


class Handler(Protocol):
    """Its other methods answer requests."""

    def close(self) -> None:
        """The other side has gone; not called where the process is ended from outside."""


def serve(make: Callable[..., Handler]) -> None:
    """Answer requests by the methods of a handler, which the first one makes, until the other side goes.

    What a generator yields is sent at once, as a part; what it returns is the reply. An ArmatureError is the caller's
    affair; after any other error the process is ended from outside, since nobody knows what it left behind.

    A handler's code may fork. A child does not have the channel, and ends where it would come back to here.
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
    """("part", value) of whatever is yielded, then ("done", value); or at any time "refused" or "failed"."""
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
