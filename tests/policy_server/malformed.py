"""Messages with something wrong, each with what its refusal has to name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.policy_server.by_hand import encode
from tests.policy_server.conftest import FRONT, STATE, WRIST, message

Malformed = tuple[bytes | str, str]
CAMERAS = (FRONT, WRIST)


def raw(value: np.ndarray[Any, Any], **changes: Any) -> dict[bytes, Any]:
    """An array as it is sent, with parts that are others."""
    parts = {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}
    return {name.encode(): part for name, part in (parts | changes).items()}


def truncated(rng: random.Random) -> Malformed:
    frame = encode(message(rng.randrange(99)))
    return frame[: rng.randrange(len(frame))], "MessagePack"


def text(rng: random.Random) -> Malformed:
    return rng.choice(("", "{}", "hello", '{"prompt": "x"}', "\0" * 50)), "text frame"


def no_map(rng: random.Random) -> Malformed:
    return encode(rng.choice((None, True, 7, -1.5, "prompt", b"x", [], [message(0)]))), "not a map"


def noise(rng: random.Random) -> Malformed:
    return b"\xc1" + rng.randbytes(rng.randrange(2000)), "MessagePack"


def trailing(rng: random.Random) -> Malformed:
    return encode(message(0)) + rng.randbytes(rng.randint(1, 100)), "follow the message"


def missing(rng: random.Random) -> Malformed:
    name = rng.choice((*CAMERAS, STATE, "prompt"))
    return encode(message(1, **{name: None})), name


def unknown(rng: random.Random) -> Malformed:
    name = rng.choice(("observation.images.left", "Prompt", "", "__class__", "state", "x" * 300))
    return encode(message(1, **{name: rng.choice((1, "x", np.zeros(3)))})), name[:20]


def image_dtype(rng: random.Random) -> Malformed:
    name, dtype = rng.choice(CAMERAS), rng.choice(("<f4", "<f8", "<i4", "|i1", "<u2", "|b1"))
    return encode(message(2, **{name: np.zeros((20, 30, 3), dtype)})), name


def image_shape(rng: random.Random) -> Malformed:
    shapes = ((3, 20, 30), (20, 30), (20, 30, 4), (20, 30, 1), (1, 20, 30, 3), (), (2700,), (5000, 2, 3))
    name = rng.choice(CAMERAS)
    return encode(message(2, **{name: np.zeros(rng.choice(shapes), np.uint8)})), name


def no_array(rng: random.Random) -> Malformed:
    name = rng.choice((*CAMERAS, STATE))
    value = rng.choice((1, "image", [0.0] * 8, {"a": 1}, b"\xff\xd8\xff\xe0", {}, [], False))
    return encode(message(2, **{name: value})), name


def object_array(rng: random.Random) -> Malformed:
    name, dtype = (
        rng.choice((*CAMERAS, STATE)),
        rng.choice(("|O", "O", "object", "|V8", "<U4", "|S3", "<M8[s]", "<c16")),
    )
    return encode(message(3, **{name: raw(np.zeros(8), dtype=dtype)})), name


def declared(rng: random.Random) -> Malformed:
    """An array that says it is larger, smaller, or larger than any memory."""
    name = rng.choice((*CAMERAS, STATE))
    shapes = ([2**62, 2**62], [10**9, 10**9, 3], [0], [-1], [7], [2**63], [1] * 200, ["8"], None, [8.0])
    return encode(message(3, **{name: raw(np.zeros(8, np.float32), shape=rng.choice(shapes))})), name


def parts(rng: random.Random) -> Malformed:
    name = rng.choice((*CAMERAS, STATE))
    changes = rng.choice(({"data": "text"}, {"data": 5}, {"dtype": None}, {"extra": 1}, {"shape": {}}, {"data": b""}))
    return encode(message(3, **{name: raw(np.zeros(8, np.float32), **changes)})), name


def state_shape(rng: random.Random) -> Malformed:
    shape = rng.choice(((7,), (9,), (1, 8), (8, 1), (), (1,)))
    return encode(message(4, **{STATE: np.zeros(shape, np.float32)})), STATE


def state_dtype(rng: random.Random) -> Malformed:
    return encode(message(4, **{STATE: np.zeros(8, rng.choice(("<i4", "|u1", "|b1")))})), STATE


def not_finite(rng: random.Random) -> Malformed:
    state = np.zeros(8, rng.choice((np.float32, np.float64)))
    state[rng.randrange(8)] = rng.choice((np.nan, np.inf, -np.inf))
    if rng.random() < 0.3:
        state = np.full(8, 1e300)  # more than float32 holds
    return encode(message(5, **{STATE: state})), STATE


def prompt(rng: random.Random) -> Malformed:
    value = rng.choice(("", "  \n", "x" * 2001, 5, b"text", ["a"], np.zeros(2), {"a": "b"}))
    return encode(message(6, prompt=value)), "prompt"


def too_many_words(rng: random.Random) -> Malformed:
    return encode(message(6, prompt=" ".join(["word"] * rng.randint(250, 400)))), "tokens"


def image_tokens(rng: random.Random) -> Malformed:
    return encode(message(6, prompt="wait <im_patch> there" * rng.randint(1, 3))), "image tokens"


def seed(rng: random.Random) -> Malformed:
    value = rng.choice((-1, 2**63, 2**64 - 1, 1.0, "1", True, [1], np.float64(2), np.zeros(1, int), {}))
    return encode(message(7, seed=value)), "seed"


def previous(rng: random.Random) -> Malformed:
    actions = rng.choice(
        (np.zeros((2, 6)), np.zeros((5, 7)), np.zeros((2, 7), int), np.full((2, 7), np.inf), [], "x", 1)
    )
    return encode(message(7, previous_actions=actions, inference_delay=1)), "previous_actions"


def delay(rng: random.Random) -> Malformed:
    value = rng.choice((-1, 3, 1.0, True, "1", None, []))
    return encode(message(7, previous_actions=np.zeros((2, 7)), inference_delay=value)), "inference_delay"


def twice(rng: random.Random) -> Malformed:
    fields = message(8)
    name = rng.choice(list(fields))
    doubled = encode({**fields, name.encode(): fields[name]})
    return doubled, name


def limits(rng: random.Random) -> Malformed:
    huge = (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 3000,
    )
    return b"\x81\xa6prompt" + rng.choice(huge) + b"a", "MessagePack"


KINDS: tuple[Callable[[random.Random], Malformed], ...] = (
    *(truncated, text, no_map, noise, trailing, missing, unknown, image_dtype, image_shape, no_array, object_array),
    *(
        declared,
        parts,
        state_shape,
        state_dtype,
        not_finite,
        prompt,
        too_many_words,
        image_tokens,
        seed,
        twice,
        limits,
        previous,
        delay,
    ),
)
