"""MessagePack and NumPy arrays, written from the byte layout of the formats, independent of the project's code.

Only the types in the policy server's messages: https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np


def encode(value: Any) -> bytes:
    """Encode a value in its shortest form; NumPy arrays and scalars become maps with binary keys (openpi)."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, np.ndarray):
        parts = {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
        return encode(parts)
    if isinstance(value, np.generic) and not isinstance(value, float):
        return encode({b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str})
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode()
        return _head(len(data), (0xA0, 32), ((0xD9, "B"), (0xDA, "H"), (0xDB, "I"))) + data
    if isinstance(value, bytes):
        return _head(len(value), None, ((0xC4, "B"), (0xC5, "H"), (0xC6, "I"))) + value
    if isinstance(value, list | tuple):
        return _head(len(value), (0x90, 16), ((0xDC, "H"), (0xDD, "I"))) + b"".join(map(encode, value))
    assert isinstance(value, dict)
    pairs = b"".join(encode(key) + encode(item) for key, item in value.items())
    return _head(len(value), (0x80, 16), ((0xDE, "H"), (0xDF, "I"))) + pairs


def _integer(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return struct.pack("b", value)
    signs = "BHIQ" if value >= 0 else "bhiq"
    for code, sign in zip(range(0xCC if value >= 0 else 0xD0, 0xD8), signs, strict=False):
        try:
            return bytes([code]) + struct.pack(f">{sign}", value)
        except struct.error:
            continue
    raise OverflowError(value)


def _head(length: int, short: tuple[int, int] | None, longer: tuple[tuple[int, str], ...]) -> bytes:
    if short and length < short[1]:
        return bytes([short[0] | length])
    for code, sign in longer:
        if length < 2 ** (8 * struct.calcsize(sign)):
            return bytes([code]) + struct.pack(f">{sign}", length)
    raise OverflowError(length)


def decode(frame: bytes) -> Any:
    value, end = _decode(frame, 0)
    assert end == len(frame)
    return value


NUMBERS = {0xCA: "f", 0xCB: "d", **dict(zip(range(0xCC, 0xD4), "BHIQbhiq", strict=True))}
LENGTHS = {0xD9: "B", 0xDA: "H", 0xDB: "I", 0xC4: "B", 0xC5: "H", 0xC6: "I", 0xDC: "H", 0xDD: "I", 0xDE: "H", 0xDF: "I"}


def _decode(frame: bytes, at: int) -> tuple[Any, int]:
    code, at = frame[at], at + 1
    if code < 0x80 or code >= 0xE0:
        return (code if code < 0x80 else code - 256), at
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], at
    if code in NUMBERS:
        (number,) = struct.unpack_from(f">{NUMBERS[code]}", frame, at)
        return number, at + struct.calcsize(NUMBERS[code])
    if code < 0xC0:
        length = code & (0x1F if code >= 0xA0 else 0x0F)
        kind = "text" if code >= 0xA0 else "list" if code >= 0x90 else "map"
    else:
        (length,) = struct.unpack_from(f">{LENGTHS[code]}", frame, at)
        at += struct.calcsize(LENGTHS[code])
        kind = (
            "text" if code >= 0xD9 and code <= 0xDB else "bytes" if code <= 0xC6 else "list" if code <= 0xDD else "map"
        )
    if kind in ("text", "bytes"):
        data = frame[at : at + length]
        assert len(data) == length
        return (data.decode() if kind == "text" else data), at + length
    items = []
    for _ in range(length * (2 if kind == "map" else 1)):
        item, at = _decode(frame, at)
        items.append(item)
    if kind == "list":
        return items, at
    return _array(dict(zip(items[::2], items[1::2], strict=True))), at


def _array(parts: dict[Any, Any]) -> Any:
    if b"__ndarray__" in parts:
        return np.frombuffer(parts[b"data"], parts[b"dtype"]).reshape(parts[b"shape"])
    return parts
