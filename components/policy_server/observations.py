"""What a robot sends: the fields of a message, and the observation that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.robots import PreviousActions, RobotObservation
from armature.components.policy_server.wire import kind, unpack, value_of

PROMPT, SEED, PREVIOUS, DELAY = "prompt", "seed", "previous_actions", "inference_delay"
LONGEST_SIDE, LONGEST_PROMPT, LARGEST_SEED = 4096, 2000, 2**63 - 1


@dataclass(frozen=True)
class PolicyRequest:
    """An observation, and the seed of its answer's noise; None: the server chooses."""

    observation: RobotObservation
    seed: int | None


@dataclass(frozen=True)
class ObservationFormat:
    """The fields of an observation, by the names that clients send them under.

    cameras: (name, the policy's key), in the policy's order. state: name. state_dimensions: of the state.
    previous: most steps and dimensions of the actions that an answer can continue, and how many actions an answer has;
    None where it cannot.
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
        """
        Args:
            cameras: The policy's keys, in its order; empty: it takes any, sorted.
            state: The name under which the state is sent.
            names: What clients call the cameras, in the same order; empty: as the policy does.
            previous: See the class.

        Raises:
            ConfigurationError: another number of names than cameras, no camera, or a name that stands for two fields.
        """
        keys = tuple(cameras) or tuple(sorted(names))
        sent = tuple(names if cameras and names else keys)
        if not keys or len(sent) != len(keys):
            raise ConfigurationError(
                f"the policy sees {len(keys)} cameras ({', '.join(keys)}), and {len(sent)} are named"
                if keys
                else "the policy does not say which cameras it sees",
                code="camera_names_mismatch",
                where="--camera",
                remedy="name every camera as robots send it, in the policy's order: --camera NAME --camera NAME",
            )
        form = cls(tuple(zip(sent, keys, strict=True)), state, state_dimensions, previous)
        if len(set(form.fields)) < len(form.fields):
            raise ConfigurationError(
                f"two fields have the same name: {', '.join(form.fields)}",
                code="field_name_repeated",
                where="--camera, --state",
                remedy="give each its own name",
            )
        return form

    @property
    def needed(self) -> tuple[str, ...]:
        return (*(name for name, _ in self.cameras), self.state, PROMPT)

    @property
    def fields(self) -> tuple[str, ...]:
        """All that are known."""
        return (*self.needed, SEED, *((PREVIOUS, DELAY) if self.previous else ()))

    def describe(self) -> dict[str, Any]:
        """For the server's metadata: dtype and shape of each field; None is any length."""
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
        """An observation of black images."""
        black = np.zeros((64, 64, 3), np.uint8)
        return RobotObservation(
            {key: black for _, key in self.cameras}, np.zeros(self.state_dimensions, np.float32), "do nothing"
        )

    def read(self, frame: bytes | str) -> PolicyRequest:
        """
        Raises:
            DataError: not a message, or a field is unknown, missing, or not what it should be; the error names it.
        """
        message = unpack(frame)
        known = self.fields
        if unknown := sorted(message.keys() - set(known)):
            raise DataError(
                f"the observation has an unknown field {unknown[0]!r:.60}",
                code="unknown_field",
                remedy=f"send only {', '.join(known)}",
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
            raise _wrong(self.state, expected, value)
        return _finite(self.state, value)

    def _previous(self, actions: Any, delay: Any) -> PreviousActions:
        assert self.previous is not None
        most, dimensions, answered = self.previous
        if not _is_array(actions, "f") or actions.shape[1:] != (dimensions,) or len(actions) > most:
            raise _wrong(PREVIOUS, f"an array of float32 with the shape [1 to {most}, {dimensions}]", actions)
        largest = min(len(actions), answered - 1)
        if type(delay) is not int or not 0 <= delay <= largest:
            why = f"{len(actions)} previous actions came, and of the {answered} of an answer one must be left"
            raise _wrong(DELAY, f"a whole number from 0 to {largest}: {why}", delay)
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
            remedy="send numbers without gaps",
        )
    return numbers


def _image(name: str, value: Any) -> NDArray[np.uint8]:
    if not _is_array(value, "u") or value.itemsize != 1 or value.ndim != 3 or value.shape[2] != 3:
        raise _wrong(name, "an array of uint8 with the shape [height, width, 3]: RGB, upright", value)
    if not 0 < min(value.shape[:2]) <= max(value.shape[:2]) <= LONGEST_SIDE:
        raise _wrong(name, f"an image with sides of 1 to {LONGEST_SIDE} pixels", value)
    image: NDArray[np.uint8] = value
    return image


def _prompt(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_PROMPT:
        raise _wrong(PROMPT, f"text of 1 to {LONGEST_PROMPT} characters that says what is to be done", value)
    return value


def _seed(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_SEED:
        raise _wrong(SEED, f"a whole number from 0 to {LARGEST_SEED}", value)
    return value


def _is_array(value: Any, kinds: str) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in kinds


def _wrong(name: str, expected: str, came: Any) -> DataError:
    return DataError(f"{kind(came)} came", code="invalid_field", where=f"field {name!r}", remedy=f"send {expected}")
