"""Encoding and decoding of messages, and the checks of observations."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from armature.components.robots.server.wire import ObservationFormat, kind, pack, unpack, value_of
from tests.refusals import refused
from tests.robots.server.by_hand import decode, encode
from tests.robots.server.conftest import FORM, FRONT, STATE, WRIST, message

DTYPES = st.sampled_from([np.dtype(one) for one in ("|b1", "|u1", "<i4", ">i8", "<f2", "<f4", ">f4", "<f8")])
ARRAYS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, max_side=5)))
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary())
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=20), ARRAYS)


def test_array_bytes_follow_the_format() -> None:
    values = np.array([[1.0, -2.0, 0.5]], np.float32)
    by_hand = b"".join(
        [
            b"\x81",  # a map of one
            b"\xa7actions",  # text of seven bytes
            b"\x84",  # a map of four
            b"\xc4\x0b__ndarray__" + b"\xc3",  # a key of eleven bytes, and true
            b"\xc4\x04data" + b"\xc4\x0c" + struct.pack("<3f", 1.0, -2.0, 0.5),
            b"\xc4\x05dtype" + b"\xa3<f4",
            b"\xc4\x05shape" + b"\x92\x01\x03",  # a list of two: 1 and 3
        ]
    )
    assert pack({"actions": values}) == encode({"actions": values}) == by_hand
    assert pack({"n": np.int16(-3)}) == b"\x81\xa1n\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\xfd\xc4\x05dtype\xa3<i2"


@given(st.dictionaries(st.text(max_size=20), VALUES, max_size=20))
def test_messages_equal_an_independent_encoder_and_round_trip(message: dict[str, Any]) -> None:
    frame = pack(message)
    assert frame == encode(message)
    np.testing.assert_equal(decode(frame), message)
    read = {name: value_of(name, value) for name, value in unpack(frame).items()}
    np.testing.assert_equal(read, message)
    for name, value in message.items():
        if isinstance(value, np.ndarray):
            assert read[name].dtype == value.dtype.newbyteorder("=") and read[name].shape == value.shape


def test_keys_may_be_text_and_dtypes_may_be_names() -> None:
    parts = {"__ndarray__": True, "data": b"\x00\x00\x80\x3f", "dtype": "float32", "shape": [1]}
    assert value_of("a", unpack(encode({"a": parts}))["a"]) == np.array([1.0], np.float32)
    assert value_of("n", {"__npgeneric__": True, "data": 3, "dtype": "<i8"}) == 3


@pytest.mark.parametrize(
    ("frame", "code", "shown"),
    [
        (b"", "message_unreadable", ""),
        (b"\xc1", "message_unreadable", ""),
        (b"\x81\xa1a", "message_unreadable", "frame of 3"),
        (b"\x81\xa1a\xc6\xff\xff\xff\xff", "message_unreadable", "frame of 8"),
        (b"\xdd\xff\xff\xff\xff", "message_unreadable", "4294967295"),
        (b"\xdf\xff\xff\xff\xff", "message_unreadable", "4294967295"),
        (b"\x81\xa1a" + b"\x91" * 5000 + b"\x00", "message_unreadable", "frame of 5004"),
        (b"\x90", "message_not_a_map", "list of 0"),
        (b"\x05", "message_not_a_map", "5"),
        (b"\x80\x80", "trailing_bytes", "1"),
        (b"\x81\x01\x02", "message_unreadable", "int"),
        (b"\x81\xa1a\xa1\xff", "message_unreadable", "utf-8"),
        (b"\x81\xc4\x01\xff\x00", "message_unreadable", "utf-8"),
        (b"\x81\xa1a\xd4\x01\x00", "message_unreadable", "max_ext_len"),
        (b"\x82\xa1a\x01\xa1a\x02", "key_repeated", "'a'"),
        (b"\x82\xa1a\x01\xc4\x01a\x02", "key_repeated", "'a'"),
        (encode({"a": [[[] for _ in range(100)] for _ in range(4)]}), "too_many_containers", "256"),
        ("hello", "text_frame", "'hello'"),
    ],
)
def test_rejects_frames_that_are_not_messages(frame: bytes | str, code: str, shown: str) -> None:
    with refused(code, shown):
        unpack(frame)


DTYPES = ("|O", "O8", "<c8", "V4", "<i4,<i4", "(1000000,1000000)<f4", 4)
SHAPES = ([0, 2**63], [-1], [1.0], [True], [1] * 100, 1)


@pytest.mark.parametrize(
    ("changes", "code", "shown"),
    [
        *(({"dtype": dtype}, "invalid_array_part", "dtype") for dtype in DTYPES),
        *(({"shape": shape}, "invalid_array_part", "shape") for shape in SHAPES),
        *(({"data": data}, "invalid_array_part", f"data {data!r}") for data in ("abcd", None)),
        ({"data": b"abc"}, "array_size_mismatch", "4 3"),
        ({"shape": [2]}, "array_size_mismatch", "8 4"),
        ({"shape": [2**40, 2**40]}, "array_size_mismatch", f"{2**82} 4"),
        ({"more": 1}, "invalid_array_keys", "more"),
    ],
    ids=str,
)
def test_rejects_invalid_parts_of_an_array(changes: Any, code: str, shown: str) -> None:
    parts = {"__ndarray__": True, "data": bytes(4), "dtype": "<f4", "shape": [1]}
    assert value_of("camera", parts) == [0.0]
    with refused(code, *shown.split(), "field 'camera'"):
        value_of("camera", parts | changes)


@pytest.mark.parametrize(("data", "dtype"), [(1.5, "<i4"), (1, "|O"), ("1", "<i4")])
def test_rejects_invalid_numpy_scalars(data: Any, dtype: str) -> None:
    with refused("invalid_array_part", "field 'seed'"):
        value_of("seed", {"__npgeneric__": True, "data": data, "dtype": dtype})


def test_errors_describe_values_briefly() -> None:
    assert kind(np.zeros((480, 640, 3))) == "an array of float64 with the shape [480, 640, 3]"
    assert kind(bytes(10**6)) == "bytes of 1000000" and kind({"a": 1}) == "a map of 1"
    assert len(kind("x" * 10**6)) == 60


@pytest.mark.parametrize("value", [object(), np.array([None]), np.zeros(2, complex), {1, 2}])
def test_only_numeric_arrays_can_be_packed(value: Any) -> None:
    with pytest.raises(TypeError):
        pack({"a": value})


def test_observation_equals_the_sent_fields() -> None:
    fields = message(3)
    request = FORM.read(encode(fields))
    assert request.seed is None and request.observation.task == fields["prompt"]
    assert list(request.observation.images) == [FRONT, WRIST]
    for name in (FRONT, WRIST):
        np.testing.assert_array_equal(request.observation.images[name], fields[name])
    np.testing.assert_array_equal(request.observation.state, fields[STATE])


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8", ">f8"])
def test_state_of_other_float_dtypes_becomes_float32(dtype: str) -> None:
    state = np.linspace(-1, 1, 8).astype(dtype)
    read = FORM.read(encode(message(0, **{STATE: state}))).observation.state
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, state.astype(np.float32))


def test_seed_may_be_a_python_or_numpy_integer() -> None:
    for seed in (0, 2**63 - 1, np.int64(5), np.uint8(7)):
        assert FORM.read(encode(message(0, seed=seed))).seed == int(seed)


def test_clients_may_use_other_field_names() -> None:
    form = ObservationFormat.of((WRIST, FRONT), 8, "observation/state", ("observation/wrist", "observation/image"))
    assert form.cameras == (("observation/wrist", WRIST), ("observation/image", FRONT))
    fields = message(0)
    sent = {"observation/wrist": fields[WRIST], "observation/image": fields[FRONT], "observation/state": fields[STATE]}
    read = form.read(encode({**sent, "prompt": "wait"})).observation
    np.testing.assert_array_equal(read.images[WRIST], fields[WRIST])
    assert list(form.describe()) == ["observation/wrist", "observation/image", "observation/state", "prompt", "seed"]
    with refused("unknown_field", repr(FRONT)):
        form.read(encode(fields))


def test_policy_without_cameras_uses_the_clients_names() -> None:
    assert ObservationFormat.of((), 8, STATE, ("b", "a")).cameras == (("a", "a"), ("b", "b"))


@pytest.mark.parametrize(
    ("cameras", "names", "code", "shown"),
    [
        ((), (), "camera_names_mismatch", ()),
        ((FRONT, WRIST), ("one",), "camera_names_mismatch", (2, 1, FRONT, WRIST)),
        ((FRONT, WRIST), ("one", "one"), "field_name_repeated", ("one", "--camera")),
        ((FRONT, WRIST), ("one", STATE), "field_name_repeated", (STATE, "--state")),
        ((FRONT, WRIST), ("one", "prompt"), "field_name_repeated", ("prompt", "--camera")),
    ],
)
def test_rejects_invalid_camera_names(
    cameras: tuple[str, ...], names: tuple[str, ...], code: str, shown: tuple[object, ...]
) -> None:
    with refused(code, *shown):
        ObservationFormat.of(cameras, 8, STATE, names)


def test_request_may_contain_previous_actions() -> None:
    actions = np.linspace(-1, 1, 21).reshape(3, 7)
    previous = FORM.read(encode(message(0, previous_actions=actions, inference_delay=2))).observation.previous
    assert previous is not None and previous.delay == 2 and previous.actions.dtype == np.float32
    np.testing.assert_array_equal(previous.actions, actions.astype(np.float32))
    assert FORM.read(encode(message(0))).observation.previous is None
    assert FORM.describe()["previous_actions"]["shape"] == [None, 7]


NO_PREVIOUS = (
    *(np.zeros(shape) for shape in ((2, 6), (5, 7), 7)),
    *(np.float32(1), np.array(1.0), np.zeros((2, 7), int)),
)


@pytest.mark.parametrize(
    ("fields", "named", "code"),
    [
        ({"previous_actions": np.zeros((2, 7))}, "inference_delay", "field_missing"),
        ({"inference_delay": 1}, "previous_actions", "field_missing"),
        *(
            ({"previous_actions": each, "inference_delay": 1}, "previous_actions", "invalid_field")
            for each in NO_PREVIOUS
        ),
        ({"previous_actions": np.full((2, 7), np.nan), "inference_delay": 1}, "previous_actions", "field_not_finite"),
        *(
            ({"previous_actions": np.zeros((2, 7)), "inference_delay": delay}, "inference_delay", "invalid_field")
            for delay in (3, -1, 1.0)
        ),
        # No action of the prediction would remain.
        ({"previous_actions": np.zeros((4, 7)), "inference_delay": 4}, "inference_delay", "invalid_field"),
    ],
)
def test_rejects_invalid_previous_actions(fields: dict[str, Any], named: str, code: str) -> None:
    with refused(code, repr(named)):
        FORM.read(encode(message(0, **fields)))
    with refused("unknown_field"):
        replace(FORM, previous=None).read(encode(message(0, **fields)))


def test_error_shows_field_expected_and_actual_value() -> None:
    with refused("invalid_field", f"field '{FRONT}'", "float32", [3, 40, 50], "uint8", "[height, width, 3]"):
        FORM.read(encode(message(0, **{FRONT: np.zeros((3, 40, 50), np.float32)})))
    with refused("field_not_finite", [2], "nan", f"field '{STATE}'"):
        FORM.read(encode(message(0, **{STATE: np.array([0, 0, np.nan, 0, 0, 0, 0, 0], np.float32)})))
