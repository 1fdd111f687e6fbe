"""The caller's side of a channel. Answers have the number of their request and the form that the caller expects."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from armature.components.machine.workers.channel import CallLimits, Channel, restored

ReplyT = TypeVar("ReplyT")
PartT = TypeVar("PartT")

ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)
NOTHING: TypeAdapter[None] = TypeAdapter(None)

_RANDOM_BITS = 32
_counter, _random = itertools.count(1), random.Random()


class ReplyForm(BaseModel):
    """Base class of answers. Values are not converted: true is not a number, and a number is not a text."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )


def array_of(dtype: DTypeLike, dimensions: int) -> Callable[[Any], NDArray[Any]]:
    """Return a validator of arrays with this dtype, this number of dimensions and only finite values."""

    def check(value: Any) -> NDArray[Any]:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != dimensions:
            raise ValueError(f"an array of {np.dtype(dtype)} with {dimensions} dimensions was expected")
        if not np.isfinite(value).all():
            raise ValueError("a value is not finite")
        return value

    return check


class HandlerFailed(Exception):
    """The handler raised an error that is not an ArmatureError."""


def new_number() -> int:
    """Return a new request number, larger than all earlier ones.

    Its lower bits are random, so a worker cannot answer a request that it has not received.
    """
    return next(_counter) << _RANDOM_BITS | _random.getrandbits(_RANDOM_BITS)


class Requests:
    """The caller's end of the channel to one worker. It sends one request at a time."""

    def __init__(self, stream: socket.socket) -> None:
        self._channel = Channel(stream)
        self.unread, self.close = self._channel.unread, self._channel.close

    def ask(
        self,
        number: int,
        request: bytes,
        limits: CallLimits,
        reply: TypeAdapter[ReplyT],
        part: TypeAdapter[PartT],
        most_parts: int,
    ) -> tuple[list[PartT], ReplyT]:
        """Send `request`, which has the `number`, and return the parts and the reply.

        The time limit covers the whole request; each part, at most `most_parts`, restarts it.

        Raises:
            ArmatureError: the handler raised it.
            HandlerFailed: the handler raised another error.
            TimeoutError: the time limit has passed.
            EOFError, OSError: the worker has ended.
            ValueError: the data received is not an answer to this request.
        """
        self._channel.send(request, limits)
        parts: list[PartT] = []
        while True:
            kind, value = self._answer(number, limits)
            match kind, value:
                case "part", _ if len(parts) < most_parts:
                    parts.append(checked(part, value))
                    limits.restart()
                case "done", _:
                    return parts, checked(reply, value)
                case "refused", _:
                    raise restored(value)
                case "failed", str():
                    raise HandlerFailed(value)
                case _:
                    raise ValueError(f"an answer of the kind {kind!r:.40}")

    def _answer(self, number: int, limits: CallLimits) -> tuple[Any, Any]:
        """Return the next answer to the request `number`. Late answers to earlier requests are dropped."""
        while True:
            match self._channel.receive(limits):
                case [int() as other, kind, value] if other == number:
                    return kind, value
                case [int() as other, _, _] if 0 < other >> _RANDOM_BITS < number >> _RANDOM_BITS:
                    pass
                case _:
                    raise ValueError("it does not answer this request: code there has written to the channel by itself")


def checked(form: TypeAdapter[ReplyT], value: Any) -> ReplyT:
    """Return the value after validation by `form`. Raises ValueError if it is not valid."""
    try:
        return form.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
