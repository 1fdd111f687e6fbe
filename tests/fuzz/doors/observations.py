"""Messages of robots to the policy server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np

from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, hostile_value
from tests.robots.server.conftest import FORM, STATE, message


def read(found: dict[object, object]) -> object:
    """Return a decoded MessagePack map. If it has the parts of an array, return the array that numpy makes of them."""
    parts = {key.decode() if isinstance(key, bytes) else key: value for key, value in found.items()}
    if "__ndarray__" not in parts:
        return parts
    return np.ndarray(parts["shape"], parts["dtype"], parts["data"])


def parts_of(value: np.ndarray) -> dict[bytes, object]:
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": list(value.shape)}


def damaged_message(rng: random.Random) -> bytes:
    """Return a valid message with damage: changed bytes, a replaced field, or a replaced part of an array."""
    fields = {
        name: parts_of(each) if isinstance(each, np.ndarray) else each
        for name, each in message(rng.randrange(99)).items()
    }
    if rng.random() < 0.3:
        fields["seed"] = rng.randrange(2**63)
    if rng.random() < 0.3:
        fields |= {"previous_actions": parts_of(np.ones((3, 7), np.float32)), "inference_delay": rng.randint(0, 3)}
    kind = rng.random()
    if kind < 0.4:
        return damaged_bytes(msgpack.packb(fields), rng)
    name = rng.choice(list(fields))
    holder, key = fields, name
    if kind < 0.8 and isinstance(fields[name], dict):
        holder, key = fields[name], rng.choice(list(fields[name]))
    holder[key] = hostile_value(rng)
    try:
        return msgpack.packb(fields, unicode_errors="surrogatepass")
    except (OverflowError, ValueError, TypeError):  # not to be said in MessagePack
        return damaged_bytes(b"", rng)


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    def attempt(rng: random.Random) -> bool:
        frame = damaged_message(rng)
        request = FORM.read(frame)
        plain = msgpack.unpackb(frame, object_hook=read)
        for name, key in FORM.cameras:
            expect(np.array_equal(request.observation.images[key], plain[name]), f"another image of {name}")
            expect(request.observation.images[key].dtype == plain[name].dtype == np.uint8, f"{name} is no image")
        state = request.observation.state
        expect(state.dtype == np.float32 and bool(np.isfinite(state).all()), "a state that is not finite")
        expect(np.array_equal(state, plain[STATE].astype(np.float32)), "another state")
        expect(
            request.observation.task == plain["prompt"] and request.seed == plain.get("seed"), "another text or seed"
        )
        previous = request.observation.previous
        expect((previous is None) == ("previous_actions" not in plain), "previous actions came or went")
        if previous is not None:
            expect(np.array_equal(previous.actions, plain["previous_actions"]), "other previous actions")
            expect(previous.delay == plain["inference_delay"] <= len(previous.actions), "another delay")
        return True

    yield attempt
