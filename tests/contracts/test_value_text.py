"""Numbers as text: the samples of RFC 8785, and every number is read back in its own type."""

from __future__ import annotations

import struct
from datetime import date, datetime, time, timedelta
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.components.contracts.value_text import plain_number, value_text

RFC_8785 = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}


@pytest.mark.parametrize(("bits", "text"), RFC_8785.items())
def test_numbers_are_written_as_in_rfc_8785(bits, text):
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert value_text(number) == value_text(np.float64(number)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (22.0, "22"),
        (np.float32(0.1), "0.1"),
        (np.float16(0.1), "0.1"),
        (np.float32(16777216), "16777216"),
        (np.float16(-9592), "-9592"),
        (np.float16(2049), "2048"),
        (np.int8(-3), "-3"),
        (2**70, str(2**70)),
        (True, "true"),
        (np.bool_(False), "false"),
        (Decimal("22.00"), "22"),
        (Decimal("-1.50"), "-1.5"),
        (Decimal("1E+30"), "1" + "0" * 30),
        (Decimal("1E-9"), "0.000000001"),
        (Decimal("-0.00"), "0"),
        (date(2024, 2, 29), "2024-02-29"),
        (datetime(2024, 2, 29, 1, 2, 3), "2024-02-29T01:02:03"),
        (time(1, 2), "01:02:00"),
        (timedelta(hours=30), "1 day, 6:00:00"),
        ("007", "007"),
        ("nan", "nan"),
    ],
)
def test_each_type_has_one_text(value, text):
    assert value_text(value) == text


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), np.float32("nan"), Decimal("NaN"), b"x", [1], {}])
def test_missing_values_and_other_types_have_no_text(value):
    with pytest.raises(ValueError):
        value_text(value)


@given(st.sampled_from([(64, np.float64), (32, np.float32), (16, np.float16)]), st.data())
def test_numbers_are_read_back_in_their_type(of, data):
    width, kind = of
    number = kind(data.draw(st.floats(width=width, allow_nan=False, allow_infinity=False)))
    text = value_text(number)
    assert kind(text) == number and not text.endswith(".0")
    assert len(text) <= len(np.format_float_positional(number, trim="-"))


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**40), max_value=10**40))
def test_decimals_are_read_back_exactly(number):
    text = value_text(number)
    assert Decimal(text) == number and "e" not in text.lower()


@given(st.one_of(st.floats(), st.decimals(allow_nan=False, allow_infinity=False, places=3)))
def test_json_numbers_keep_values_and_whole_floats_become_ints(number):
    plain = plain_number(number)
    if plain is None:
        assert number != number or abs(number) == float("inf")
    else:
        assert type(number)(str(plain)) == number
        assert isinstance(plain, int) == (
            number == int(number) and (isinstance(number, Decimal) or abs(number) < 2**53)
        )
