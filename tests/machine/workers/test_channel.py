"""Any received bytes give either a value or one of the documented errors."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from armature.components.machine.workers.channel import CallLimits, Channel, encoded

NUMBERS = st.sampled_from(["<f4", "<f8", "<f2", "|u1", "|b1", "<i8", ">i2", "<u4"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | arrays.arrays(NUMBERS, arrays.array_shapes(min_dims=0, min_side=0, max_side=3)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
SIDES = st.integers(-2, 5) | st.sampled_from([2**31, 2**63, 2**70, 1.5, "2", None, True, [1]])
SHAPES = st.lists(SIDES, max_size=70) | SIDES
NAMES = NUMBERS | st.text(max_size=6) | st.sampled_from(["|O", "<f1", "<b8", "<c8", "|S4", "<M8", "i4,i4", 4, None])


def received(data: bytes) -> Any:
    """Send `data` to a channel, close the sending side, and return the value that the channel reads."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        return Channel(ours).receive(CallLimits(5.0, 2**20))


def told(data: bytes) -> None:
    with suppress(ValueError, EOFError):
        received(data)


def plain(value: Any) -> Any:
    """Return a value that can be compared with ==: arrays become lists of their dtype, shape and bytes."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


@given(VALUES)
def test_codec_returns_the_same_value(value: Any) -> None:
    assert plain(received(encoded(value))) == plain(value)


@given(st.binary(max_size=64))
def test_codec_survives_any_bytes(data: bytes) -> None:
    told(data)
    told(struct.pack("<Q", len(data)) + data)


@given(VALUES, st.data())
def test_codec_detects_damaged_values(value: Any, data: st.DataObject) -> None:
    sent = bytearray(encoded(value))
    for _ in range(data.draw(st.integers(1, 4))):
        sent[data.draw(st.integers(8, len(sent) - 1))] = data.draw(st.integers(0, 255))
    told(bytes(sent[: data.draw(st.integers(0, len(sent)))]))


@given(NAMES, SHAPES, st.binary(max_size=32))
def test_codec_returns_arrays_of_any_dtype_and_shape(name: Any, shape: Any, data: bytes) -> None:
    document = json.dumps({"$array": [name, shape]}).encode()
    told(struct.pack("<Q", len(document)) + document + data)
