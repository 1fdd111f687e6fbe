"""Messages between robots and the policy server: MessagePack, with numpy's arrays and numbers as maps.

An array is the map {"__ndarray__": true, "data": its bytes in C order, "dtype": "<f4", "shape": [30, 7]}, a number of
numpy's {"__npgeneric__": true, "data": the number, "dtype": "<f4"}. That is what openpi's clients speak (package
openpi-client, openpi_client.msgpack_numpy). They write the four keys as binary strings and read only those, so we write
them so; we read text as well. Nothing is unpickled, and what a message may declare is limited before memory is taken.
"""

from __future__ import annotations

import re
from itertools import count
from math import prod
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import DataError

Message = dict[str, Any]
"""Field to value, as MessagePack has it; `value_of` reads arrays and numbers of numpy's."""

ARRAY, NUMBER = "__ndarray__", "__npgeneric__"
MOST_DIMENSIONS, MOST_ITEMS, MOST_CONTAINERS, LONGEST_TEXT = 8, 256, 256, 2**16
_DTYPE = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248])|u?int(8|16|32|64)|float(16|32|64)|bool")
_ARRAY_KEYS, _NUMBER_KEYS = {ARRAY, "data", "dtype", "shape"}, {NUMBER, "data", "dtype"}
_KINDS: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (float, int)}


def pack(message: Message) -> bytes:
    """The frame of a message whose values may be arrays and numbers of numpy's."""
    frame: bytes = msgpack.packb(message, default=_encoded)
    return frame


def unpack(frame: bytes | str) -> Message:
    """
    Raises:
        DataError: text, not one whole MessagePack map, keys that repeat or are not text, or too many values in it.
    """
    if isinstance(frame, str):
        raise DataError(
            "the message is a text frame",
            code="text_frame",
            where=f"it begins with {frame[:40]!r}",
            remedy="send one binary frame: a MessagePack map with the fields of the observation",
        )
    containers = count(1)

    def keep_list(items: list[Any]) -> list[Any]:
        _count(next(containers))
        return items

    def keep_map(pairs: list[tuple[str | bytes, Any]]) -> Message:
        _count(next(containers))
        return _map(pairs)

    try:
        message = msgpack.unpackb(
            frame,
            list_hook=keep_list,
            object_pairs_hook=keep_map,
            max_array_len=MOST_ITEMS,
            max_map_len=MOST_ITEMS,
            max_str_len=LONGEST_TEXT,
            max_ext_len=0,
        )
    except msgpack.ExtraData as error:
        raise DataError(
            f"{len(error.extra)} bytes follow the message",
            code="trailing_bytes",
            where=f"a frame of {len(frame)} bytes",
            remedy=_ONE_MAP,
        ) from error
    except (ValueError, msgpack.UnpackException) as error:
        raise DataError(
            f"the message cannot be read as MessagePack: {str(error) or type(error).__name__}",
            code="message_unreadable",
            where=f"a frame of {len(frame)} bytes",
            remedy=_ONE_MAP,
        ) from error
    if not isinstance(message, dict):
        raise DataError(f"the message is {kind(message)}, not a map", code="message_not_a_map", remedy=_ONE_MAP)
    return message


_ONE_MAP = "send one MessagePack map in each frame, with the fields that the server's metadata names"


def value_of(field: str, value: Any) -> Any:
    """What a field holds: an array, a number, or what MessagePack itself can say.

    Raises:
        DataError: an array or a number of numpy's whose parts contradict each other, or of another dtype than booleans,
            integers and floats.
    """
    if not isinstance(value, dict):
        return value
    if ARRAY in value:
        return _array(field, value)
    return _number(field, value) if NUMBER in value else value


def kind(value: Any) -> str:
    """A value for an error message: what it is, not all that it holds."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with the shape {list(value.shape)}"
    for container, name in ((dict, "a map"), (list, "a list"), (bytes, "bytes")):
        if isinstance(value, container):
            return f"{name} of {len(value)}"
    return f"{value!r:.60}"


def _count(containers: int) -> None:
    if containers > MOST_CONTAINERS:
        raise DataError(
            f"the message has more than {MOST_CONTAINERS} lists and maps", code="too_many_containers", remedy=_ONE_MAP
        )


def _map(pairs: list[tuple[str | bytes, Any]]) -> Message:
    found: Message = {}
    for key, value in pairs:
        name = key.decode() if isinstance(key, bytes) else key
        if name in found:
            raise DataError(
                "a map has the same key twice",
                code="key_repeated",
                where=f"{name!r:.60}",
                remedy="send each field once",
            )
        found[name] = value
    return found


def _array(field: str, value: Message) -> NDArray[Any]:
    _refuse_keys(field, value, _ARRAY_KEYS)
    dtype, shape, data = _dtype(field, value["dtype"]), value["shape"], value["data"]
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_DIMENSIONS
        or not all(type(side) is int and side > 0 for side in shape)
    ):
        raise _wrong(field, "shape", f"a list of at most {MOST_DIMENSIONS} whole numbers above 0", shape)
    if not isinstance(data, bytes):
        raise _wrong(field, "data", "bytes", data)
    if (needed := prod(shape) * dtype.itemsize) != len(data):
        raise DataError(
            f"an array of {dtype} with the shape {shape!s:.80} has {needed} bytes, and {len(data)} came",
            code="array_size_mismatch",
            where=f"field {field!r}",
            remedy="send the array's bytes in C order, all of them",
        )
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _number(field: str, value: Message) -> bool | int | float:
    _refuse_keys(field, value, _NUMBER_KEYS)
    dtype = _dtype(field, value["dtype"])
    number: bool | int | float = value["data"]
    if type(number) not in _KINDS[dtype.kind]:
        raise _wrong(field, "data", f"a number of {dtype}", number)
    return number


def _dtype(field: str, name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise _wrong(field, "dtype", "that of booleans, integers or floats, such as '|u1' or '<f4'", name)
    return np.dtype(name)


def _refuse_keys(field: str, value: Message, keys: set[str]) -> None:
    if value.keys() != keys:
        raise DataError(
            f"an array or a number of numpy's has the keys {', '.join(sorted(keys))}; "
            f"{', '.join(sorted(value)):.80} came",
            code="invalid_array_keys",
            where=f"field {field!r}",
        )


def _wrong(field: str, part: str, expected: str, came: Any) -> DataError:
    return DataError(f"{part} is {kind(came)}, not {expected}", code="invalid_array_part", where=f"field {field!r}")


def _encoded(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _KINDS:
        raise TypeError(f"{type(value).__name__} cannot be sent")
    if isinstance(value, np.ndarray):
        parts = {ARRAY: True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}
    else:
        parts = {NUMBER: True, "data": value.item(), "dtype": value.dtype.str}
    return {key.encode(): part for key, part in parts.items()}
