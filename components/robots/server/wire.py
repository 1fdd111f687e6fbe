"""Messages between robots and the policy server: MessagePack, with NumPy arrays and scalars as maps.

An array is the map {"__ndarray__": true, "data": its bytes in C order, "dtype": "<f4", "shape": [30, 7]}. A scalar is
the map {"__npgeneric__": true, "data": the number, "dtype": "<f4"}. This is the format of openpi's clients (package
openpi-client, module openpi_client.msgpack_numpy). They write and read these keys only as binary strings, so we write
binary strings too; we also read keys that are text. Nothing is unpickled, and sizes declared in a message are checked
before memory is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.robots import PreviousActions, RobotObservation

Message = dict[str, Any]
"""Fields and values of a message as MessagePack decodes them; `value_of` converts values to arrays and numbers."""

KEY = "ARMATURE_POLICY_KEY"
"""Environment variable with the key of a policy server, for servers and clients."""
SCHEME = "Api-Key "
"""Beginning of the header Authorization, before the key."""
ARRAY, NUMBER = "__ndarray__", "__npgeneric__"
MOST_DIMENSIONS, MOST_ITEMS, MOST_CONTAINERS, LONGEST_TEXT = 8, 256, 256, 2**16
_DTYPE = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248])|u?int(8|16|32|64)|float(16|32|64)|bool")
_ARRAY_KEYS, _NUMBER_KEYS = {ARRAY, "data", "dtype", "shape"}, {NUMBER, "data", "dtype"}
_KINDS: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (float, int)}


def pack(message: Message) -> bytes:
    """Encode a message as a frame; values may be NumPy arrays and scalars.

    Example:
        >>> frame = pack({"prompt": "open the drawer", "state": np.zeros(2, np.float32)})
        >>> value_of("state", unpack(frame)["state"])
        array([0., 0.], dtype=float32)
    """
    frame: bytes = msgpack.packb(message, default=_encoded)
    return frame


@contextmanager
def sent_by(sender: str, remedy: str) -> Iterator[None]:
    """Name the sender of a message in errors of the message, and tell the receiver what to do about it."""
    try:
        yield
    except DataError as error:
        where = f"{error.where}, {sender}" if error.where else sender
        raise DataError(error.what, code=error.code, where=where, remedy=remedy) from error


def unpack(frame: bytes | str) -> Message:
    """Decode a frame to a message.

    Raises:
        DataError: the frame is text or not exactly one MessagePack map, a key repeats or is not text, or the message
            has too many values.
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
    """Convert a field's value to an array or a number if it is a map for one; return other values unchanged.

    Raises:
        DataError: the parts of an array or scalar contradict each other, or its dtype is not a boolean, integer or
            float.
    """
    if not isinstance(value, dict):
        return value
    if ARRAY in value:
        return _array(field, value)
    return _number(field, value) if NUMBER in value else value


def kind(value: Any) -> str:
    """Describe a value's type and size for an error message."""
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
    """Return the pairs of a MessagePack map as a dict with text keys; a key that occurs twice raises DataError."""
    message: Message = {}
    for key, value in pairs:
        name = key.decode() if isinstance(key, bytes) else key
        if name in message:
            raise DataError(
                "a map has the same key twice",
                code="key_repeated",
                where=f"{name!r:.60}",
                remedy="send each field once",
            )
        message[name] = value
    return message


def _array(field: str, value: Message) -> NDArray[Any]:
    """Decode a map with `__ndarray__` to an array in native byte order, after checking its parts."""
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
            f"an array of {dtype} with the shape {shape!s:.80} has {needed} bytes, but {len(data)} were sent",
            code="array_size_mismatch",
            where=f"field {field!r}",
            remedy="send all of the array's bytes, in C order",
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
        raise _wrong(field, "dtype", "a boolean, integer or float dtype such as '|u1' or '<f4'", name)
    return np.dtype(name)


def _refuse_keys(field: str, value: Message, keys: set[str]) -> None:
    if value.keys() != keys:
        raise DataError(
            f"a NumPy array or scalar must have the keys {', '.join(sorted(keys))}, "
            f"but {', '.join(sorted(value)):.80} were sent",
            code="invalid_array_keys",
            where=f"field {field!r}",
        )


def _wrong(field: str, part: str, expected: str, value: Any) -> DataError:
    return DataError(f"{part} is {kind(value)}, not {expected}", code="invalid_array_part", where=f"field {field!r}")


def _encoded(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _KINDS:
        raise TypeError(f"{type(value).__name__} cannot be sent")
    if isinstance(value, np.ndarray):
        parts = {ARRAY: True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}
    else:
        parts = {NUMBER: True, "data": value.item(), "dtype": value.dtype.str}
    return {key.encode(): part for key, part in parts.items()}


# --- Observations ---

PROMPT, SEED, PREVIOUS, DELAY = "prompt", "seed", "previous_actions", "inference_delay"
LONGEST_SIDE, LONGEST_PROMPT, LARGEST_SEED = 4096, 2000, 2**63 - 1


@dataclass(frozen=True)
class PolicyRequest:
    """An observation, and the seed of the prediction's noise; None: the server chooses the seed."""

    observation: RobotObservation
    seed: int | None


@dataclass(frozen=True)
class ObservationFormat:
    """Names and shapes of the fields in which clients send an observation.

    cameras: pairs of a field's name and the policy's camera key, in the policy's order.
    state: name of the state's field. state_dimensions: number of dimensions of the state.
    previous: largest number of previous actions that a prediction can continue, their number of dimensions, and the
        number of actions in an answer; None if the policy cannot continue previous actions.

    Example:
        >>> form = ObservationFormat.of(["observation.images.front"], 8, "state", names=["front"])
        >>> form.fields
        ('front', 'state', 'prompt', 'seed')
        >>> image, state = np.zeros((48, 64, 3), np.uint8), np.zeros(8, np.float32)
        >>> request = form.read(pack({"front": image, "state": state, "prompt": "open the drawer"}))
        >>> request.observation.images["observation.images.front"].shape
        (48, 64, 3)
    """

    cameras: tuple[tuple[str, str], ...]
    state: str
    state_dimensions: int
    previous: tuple[int, int, int] | None = None

    @classmethod
    def of(
        cls,
        cameras: Sequence[str],
        state_dimensions: int,
        state: str,
        names: Sequence[str] = (),
        previous: tuple[int, int, int] | None = None,
    ) -> ObservationFormat:
        """Make the format for a policy.

        Args:
            cameras: The policy's camera keys, in its order; empty: the policy takes any cameras, sorted by name.
            state_dimensions: Number of dimensions of the policy's state.
            state: Name under which clients send the state.
            names: Names under which clients send the cameras, in the same order; empty: the policy's camera keys.
            previous: See the class.

        Raises:
            ConfigurationError: there are no cameras, names and cameras differ in number, or two fields have one name.
        """
        keys = tuple(cameras) or tuple(sorted(names))
        sent = tuple(names if cameras and names else keys)
        if not keys or len(sent) != len(keys):
            raise ConfigurationError(
                f"the policy uses {len(keys)} cameras ({', '.join(keys)}), but {len(sent)} are named"
                if keys
                else "the policy names no cameras",
                code="camera_names_mismatch",
                where="--camera",
                remedy="name each camera as robots send it, in the policy's order: --camera NAME --camera NAME",
            )
        form = cls(tuple(zip(sent, keys, strict=True)), state, state_dimensions, previous)
        if len(set(form.fields)) < len(form.fields):
            raise ConfigurationError(
                f"two fields have the same name: {', '.join(form.fields)}",
                code="field_name_repeated",
                where="--camera, --state",
                remedy="give each field a different name",
            )
        return form

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the fields that every message must have."""
        return (*(name for name, _ in self.cameras), self.state, PROMPT)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of all fields, including optional ones."""
        return (*self.needed, SEED, *((PREVIOUS, DELAY) if self.previous else ()))

    def describe(self) -> dict[str, Any]:
        """Return dtype and shape of each field for the server's metadata; None stands for any length."""
        described: dict[str, Any] = {
            **{name: {"dtype": "uint8", "shape": [None, None, 3]} for name, _ in self.cameras},
            self.state: {"dtype": "float32", "shape": [self.state_dimensions]},
            PROMPT: {"dtype": "text"},
            SEED: {"dtype": "int", "optional": True},
        }
        if self.previous:
            described[PREVIOUS] = {"dtype": "float32", "shape": [None, self.previous[1]], "optional": True}
            described[DELAY] = {"dtype": "int", "optional": True}
        return described

    def blank(self) -> RobotObservation:
        """Return an observation with black images, for a first prediction before any client connects."""
        black = np.zeros((64, 64, 3), np.uint8)
        return RobotObservation(
            {key: black for _, key in self.cameras}, np.zeros(self.state_dimensions, np.float32), "do nothing"
        )

    def read(self, frame: bytes | str) -> PolicyRequest:
        """Decode and check a request.

        Raises:
            DataError: the frame is invalid, or a field is unknown, missing or invalid; the error names the field.
        """
        message = unpack(frame)
        if unknown := sorted(message.keys() - set(self.fields)):
            raise DataError(
                f"the observation has an unknown field {unknown[0]!r:.60}",
                code="unknown_field",
                remedy=f"send only {', '.join(self.fields)}",
            )
        both = (PREVIOUS, DELAY) if PREVIOUS in message or DELAY in message else ()
        if missing := [name for name in (*self.needed, *both) if name not in message]:
            raise DataError(
                f"the observation lacks the field {missing[0]!r}",
                code="field_missing",
                where=f"it has {', '.join(sorted(message)) or 'no fields'}",
                remedy=f"send {', '.join((*self.needed, *both))}",
            )
        values = {name: value_of(name, value) for name, value in message.items()}
        images = {key: _image(name, values[name]) for name, key in self.cameras}
        previous = self._previous(values[PREVIOUS], values[DELAY]) if both else None
        observation = RobotObservation(images, self._state(values[self.state]), _prompt(values[PROMPT]), previous)
        return PolicyRequest(observation, _seed(values[SEED]) if SEED in values else None)

    def _state(self, value: Any) -> NDArray[np.float32]:
        expected = f"an array of float32 with the shape [{self.state_dimensions}]"
        if not _is_array(value, "f") or value.shape != (self.state_dimensions,):
            raise _wrong_field(self.state, expected, value)
        return _finite(self.state, value)

    def _previous(self, actions: Any, delay: Any) -> PreviousActions:
        assert self.previous is not None
        most, dimensions, predicted = self.previous
        if not _is_array(actions, "f") or actions.shape[1:] != (dimensions,) or len(actions) > most:
            raise _wrong_field(PREVIOUS, f"an array of float32 with the shape [1 to {most}, {dimensions}]", actions)
        largest = min(len(actions), predicted - 1)
        if type(delay) is not int or not 0 <= delay <= largest:
            why = f"{len(actions)} previous actions were sent, and one of the {predicted} new actions must remain"
            raise _wrong_field(DELAY, f"a whole number from 0 to {largest}: {why}", delay)
        return PreviousActions(_finite(PREVIOUS, actions), delay)


def _finite(name: str, value: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        numbers: NDArray[np.float32] = value.astype(np.float32)
    if not np.isfinite(numbers).all():
        place = np.argwhere(~np.isfinite(numbers))[0].tolist()
        raise DataError(
            f"number {place} is {value[tuple(place)]}, which is not finite in float32",
            code="field_not_finite",
            where=f"field {name!r}",
            remedy="send finite numbers",
        )
    return numbers


def _image(name: str, value: Any) -> NDArray[np.uint8]:
    if not _is_array(value, "u") or value.itemsize != 1 or value.ndim != 3 or value.shape[2] != 3:
        raise _wrong_field(name, "an array of uint8 with the shape [height, width, 3]: RGB, upright", value)
    if not 0 < min(value.shape[:2]) <= max(value.shape[:2]) <= LONGEST_SIDE:
        raise _wrong_field(name, f"an image with sides of 1 to {LONGEST_SIDE} pixels", value)
    image: NDArray[np.uint8] = value
    return image


def _prompt(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_PROMPT:
        raise _wrong_field(PROMPT, f"the task as text of 1 to {LONGEST_PROMPT} characters", value)
    return value


def _seed(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_SEED:
        raise _wrong_field(SEED, f"a whole number from 0 to {LARGEST_SEED}", value)
    return value


def _is_array(value: Any, kinds: str) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in kinds


def _wrong_field(name: str, expected: str, value: Any) -> DataError:
    what = f"the value is {kind(value)}"
    return DataError(what, code="invalid_field", where=f"field {name!r}", remedy=f"send {expected}")
