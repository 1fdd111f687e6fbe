"""Messages have the bytes that the format says, and none is taken for something that it is not."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from components.contracts.errors import DataError
from components.policy_server.wire import kind, pack, unpack, value_of
from tests.policy_server.by_hand import decode, encode

DTYPES = st.sampled_from([np.dtype(one) for one in ("|b1", "|u1", "<i4", ">i8", "<f2", "<f4", ">f4", "<f8")])
ARRAYS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, max_side=5)))
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary())
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=20), ARRAYS)


def test_an_array_is_written_byte_for_byte_as_the_format_says() -> None:
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
def test_what_is_written_equals_an_implementation_by_hand_and_is_read_again(message: dict[str, Any]) -> None:
    frame = pack(message)
    assert frame == encode(message)
    np.testing.assert_equal(decode(frame), message)
    read = {name: value_of(name, value) for name, value in unpack(frame).items()}
    np.testing.assert_equal(read, message)
    for name, value in message.items():
        if isinstance(value, np.ndarray):
            assert read[name].dtype == value.dtype.newbyteorder("=") and read[name].shape == value.shape


def test_keys_may_be_text_and_dtypes_names() -> None:
    parts = {"__ndarray__": True, "data": b"\x00\x00\x80\x3f", "dtype": "float32", "shape": [1]}
    assert value_of("a", unpack(encode({"a": parts}))["a"]) == np.array([1.0], np.float32)
    assert value_of("n", {"__npgeneric__": True, "data": 3, "dtype": "<i8"}) == 3


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"", "cannot be read as MessagePack"),
        (b"\xc1", "cannot be read as MessagePack"),
        (b"\x81\xa1a", "incomplete input"),
        (b"\x81\xa1a\xc6\xff\xff\xff\xff", "incomplete input"),
        (b"\xdd\xff\xff\xff\xff", "4294967295 exceeds max_array_len"),
        (b"\xdf\xff\xff\xff\xff", "4294967295 exceeds max_map_len"),
        (b"\x81\xa1a" + b"\x91" * 5000 + b"\x00", "cannot be read as MessagePack"),
        (b"\x90", "a list of 0, not a map"),
        (b"\x05", "is 5, not a map"),
        (b"\x80\x80", "1 bytes follow the message"),
        (b"\x81\x01\x02", "int is not allowed for map key"),
        (b"\x81\xa1a\xa1\xff", "utf-8"),
        (b"\x81\xc4\x01\xff\x00", "utf-8"),
        (b"\x81\xa1a\xd4\x01\x00", "exceeds max_ext_len"),
        (b"\x82\xa1a\x01\xa1a\x02", "the same key twice"),
        (b"\x82\xa1a\x01\xc4\x01a\x02", "the same key twice"),
        (encode({"a": [[[] for _ in range(100)] for _ in range(4)]}), "more than 256 lists and maps"),
        ("hello", "a text frame"),
    ],
)
def test_what_is_no_message_is_refused(frame: bytes | str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        unpack(frame)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "|O"}, "dtype is '|O'"),
        ({"dtype": "O8"}, "dtype is 'O8'"),
        ({"dtype": "<c8"}, "dtype is '<c8'"),
        ({"dtype": "V4"}, "dtype is 'V4'"),
        ({"dtype": "<i4,<i4"}, "dtype is '<i4,<i4'"),
        ({"dtype": "(1000000,1000000)<f4"}, "dtype is"),
        ({"dtype": 4}, "dtype is 4"),
        ({"data": "abcd"}, "data is 'abcd', not bytes"),
        ({"data": b"abc"}, "has 4 bytes, and 3 came"),
        ({"shape": [2]}, "has 8 bytes, and 4 came"),
        ({"shape": [2**40, 2**40]}, "bytes, and 4 came"),
        ({"shape": [0, 2**63]}, "shape is a list of 2, not a list"),
        ({"shape": [-1]}, "shape is a list of 1, not a list"),
        ({"shape": [1.0]}, "shape is a list of 1, not a list"),
        ({"shape": [True]}, "shape is a list of 1, not a list"),
        ({"shape": [1] * 100}, "shape is a list of 100, not a list"),
        ({"shape": 1}, "shape is 1, not a list"),
        ({"more": 1}, "more"),
        ({"data": None}, "data is None"),
    ],
)
def test_an_array_whose_parts_are_wrong_is_refused_by_the_name_of_its_field(changes: Any, said: str) -> None:
    parts = {"__ndarray__": True, "data": bytes(4), "dtype": "<f4", "shape": [1]}
    assert value_of("camera", parts) == [0.0]
    with pytest.raises(DataError) as refusal:
        value_of("camera", parts | changes)
    assert said in refusal.value.what and refusal.value.where == "field 'camera'"


@pytest.mark.parametrize(
    "parts", [{"data": 1.5, "dtype": "<i4"}, {"data": 1, "dtype": "|O"}, {"data": "1", "dtype": "<i4"}]
)
def test_a_number_of_numpy_s_is_one(parts: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="field 'seed'"):
        value_of("seed", {"__npgeneric__": True, **parts})


def test_an_error_shows_what_a_value_is_and_not_all_of_it() -> None:
    assert kind(np.zeros((480, 640, 3))) == "an array of float64 with the shape [480, 640, 3]"
    assert kind(bytes(10**6)) == "bytes of 1000000" and kind({"a": 1}) == "a map of 1"
    assert len(kind("x" * 10**6)) == 60


@pytest.mark.parametrize("value", [object(), np.array([None]), np.zeros(2, complex), {1, 2}])
def test_only_arrays_of_numbers_are_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        pack({"a": value})
