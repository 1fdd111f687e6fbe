"""Malformed messages, each with a word that the error must contain."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.robots.server.by_hand import encode
from tests.robots.server.conftest import FRONT, STATE, WRIST, message


def raw(**changes: Any) -> dict[bytes, Any]:
    """Return the encoded form of eight float32 numbers, a map, with `changes` to its parts."""
    parts = {"__ndarray__": True, "data": bytes(32), "dtype": "<f4", "shape": [8]}
    return {name.encode(): part for name, part in (parts | changes).items()}


DTYPES = ("|O", "O", "object", "|V8", "<U4", "|S3", "<M8[s]", "<c16", None)
SHAPES = ([2**62, 2**62], [10**9, 10**9, 3], [0], [-1], [7], [2**63], [1] * 200, ["8"], None, [8.0], {})
NO_ARRAY = (
    *(1, "image", [0.0] * 8, {"a": 1}, b"\xff\xd8\xff\xe0", {}, [], False),
    *(raw(dtype=dtype) for dtype in DTYPES),
    *(raw(shape=shape) for shape in SHAPES),
    *(raw(**change) for change in ({"data": "text"}, {"data": 5}, {"extra": 1}, {"data": b""})),
)
IMAGE_SHAPES = ((3, 20, 30), (20, 30), (20, 30, 4), (20, 30, 1), (1, 20, 30, 3), (), (2700,), (5000, 2, 3))
NO_IMAGE = (
    *(np.zeros((20, 30, 3), dtype) for dtype in ("<f4", "<f8", "<i4", "|i1", "<u2", "|b1")),
    *(np.zeros(shape, np.uint8) for shape in IMAGE_SHAPES),
)
NO_STATE = (
    *(np.zeros(shape, np.float32) for shape in ((7,), (9,), (1, 8), (8, 1), (), (1,))),
    *(np.zeros(8, dtype) for dtype in ("<i4", "|u1", "|b1")),
    *(np.array([0, 0, value, 0, 0, 0, 0, 0], dtype) for value in (np.nan, np.inf) for dtype in (np.float32, float)),
    np.full(8, 1e300),  # more than float32 holds
)
FIELDS: dict[str, tuple[Any, ...]] = {
    FRONT: (None, *NO_ARRAY, *NO_IMAGE),
    WRIST: (None, *NO_ARRAY, *NO_IMAGE),
    STATE: (None, *NO_ARRAY, *NO_STATE),
    "prompt": (None, "", "  \n", "x" * 2001, 5, b"text", ["a"], np.zeros(2), {"a": "b"}),
    "seed": (-1, 2**63, 2**64 - 1, 1.0, "1", True, [1], np.float64(2), np.zeros(1, int), {}),
    **dict.fromkeys(("observation.images.left", "Prompt", "", "__class__", "state"), (1, "x", np.zeros(3))),
}
"""Invalid values for each field of an observation. None means that the field is left out."""
WHOLE = encode(message(0))
HUGE = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 3000,
)
FRAMES: dict[str, tuple[bytes | str, ...]] = {
    "text frame": ("", "{}", "hello", '{"prompt": "x"}', "\0" * 50),
    "not a map": tuple(map(encode, (None, True, 7, -1.5, "prompt", b"x", [], [message(0)]))),
    "follow the message": (WHOLE + b"\0", WHOLE + WHOLE),
    "tokens": (encode(message(6, prompt=" ".join(["word"] * 300))),),
    "image tokens": (encode(message(6, prompt="wait <im_patch> there")),),
    "MessagePack": (
        *(WHOLE[:length] for length in (0, 1, 100, 5000, len(WHOLE) - 1)),
        *(b"\xc1", b"\xc1" + bytes(2000)),
        *(b"\x81\xa6prompt" + each + b"a" for each in HUGE),
    ),
    "'prompt'": (encode({**message(8), b"prompt": "wait"}),),  # a repeated key
}
MALFORMED = [
    *((encode(message(1, **{name: value})), name) for name, values in FIELDS.items() for value in values),
    *((frame, named) for named, frames in FRAMES.items() for frame in frames),
]
