"""Conversion of table values to text, the same in prompts, answers, rewards, splits, filters and reports."""

from __future__ import annotations

import math
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

EXACT = 2**53
"""The number up to which float64 represents every whole number exactly."""


def value_text(value: Any) -> str:
    """Return the shortest text that parses to the same value in its type; whole numbers have no ".0".

    Numbers have the form of RFC 8785 and JavaScript: -0.0 is 0, and exponents begin at 1e21 and at 1e-7 (1e+21, 1e-7).
    Integers and decimals never have an exponent. True is true, and dates and times are ISO 8601.

    >>> [value_text(value) for value in (22.0, np.float32(0.1), 1e20, 1e-7, True, Decimal("1.50"))]
    ['22', '0.1', '100000000000000000000', '1e-7', 'true', '1.5']

    Raises:
        ValueError: the value is missing (None, NaN), infinite, or of an unsupported type.
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating) and math.isfinite(value) and _is_exact(value):
        return str(int(value))  # the number itself: as short, and float16's 9592 would be 9590 in its own digits
    if isinstance(value, np.floating) and math.isfinite(value):
        return _number(Decimal(np.format_float_scientific(value, unique=True)), 21, -6)
    if isinstance(value, float) and math.isfinite(value):
        return _number(Decimal(repr(value)), 21, -6)
    if isinstance(value, Decimal) and value.is_finite():
        return _number(value, math.inf, -math.inf)
    if isinstance(value, date | time) and value == value:  # pandas' NaT is unlike itself
        return value.isoformat()
    if isinstance(value, timedelta) and value == value:
        return str(value)
    raise ValueError(f"{value!r:.100} has no text")


def plain_number(value: float | Decimal) -> int | float | str | None:
    """Return a table's number for JSON: whole numbers as int, and None (missing) for NaN and infinities.

    A decimal with more digits than float64 can hold is returned as text.
    """
    if not math.isfinite(value):
        return None
    if _is_exact(value):
        return int(value)
    number = float(value)
    return number if isinstance(value, float) or Decimal(repr(number)) == value else value_text(value)


def _is_exact(value: float | np.floating[Any] | Decimal) -> bool:
    """Check whether `value` is a whole number that its type represents exactly, so that all of its digits are valid.

    Decimals are always exact; floats are exact below `EXACT`.
    """
    return int(value) == value and (isinstance(value, Decimal) or abs(int(value)) < EXACT)


def _number(value: Decimal, most: float, least: float) -> str:
    """Return a decimal number as text.

    The text has no exponent if the decimal point is more than `least` and at most `most` places after the start of the
    digits; a negative count means zeros between the point and the first digit.
    """
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)  # the value is finite
    text = "".join(map(str, digits)).lstrip("0")
    point = len(text) + exponent
    text = text.rstrip("0")
    if not text:
        return "0"
    minus = "-" * sign
    if not least < point <= most:
        fraction = f".{text[1:]}" if len(text) > 1 else ""
        return f"{minus}{text[0]}{fraction}e{point - 1:+d}"
    if point <= 0:
        return f"{minus}0.{'0' * -point}{text}"
    whole, fraction = text[:point].ljust(point, "0"), text[point:]
    return f"{minus}{whole}.{fraction}" if fraction else f"{minus}{whole}"
