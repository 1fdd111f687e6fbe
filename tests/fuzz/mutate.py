"""Damage done to valid inputs, a function of a random generator alone."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, -0.0, 2**31, -(2**31), 2**63, 10**30, 1e308, float("nan"), float("inf")),
    *("", " ", "0", "nan", "true", "\0", "\ud800", "é" * 40, "../x", "/etc/hostname", "a\nb", "{x}", "x" * 5000),
    *([], {}, [[]], [None], {"": None}, [1] * 300, {"a": {"b": {"c": []}}}),
)


DEEP = "<deep>"
"""Placeholder for lists in lists that are nested too deeply for a parser. `dumps` replaces it by the lists."""


def dumps(document: Any) -> bytes:
    """Return a document as JSON in Python's loose form, which allows NaN and unpaired surrogates. `DEEP` becomes
    100,000 nested lists."""
    levels = 100_000
    return json.dumps(document).replace(f'"{DEEP}"', "[" * levels + "]" * levels).encode()


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return a copy of the bytes with one to four edits, each of a random kind at a random place."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        rng.choice(_EDITS)(content, rng)
    return bytes(content)


def _at(content: bytearray, rng: random.Random) -> int:
    """Return a random index in `content`. Half of these are among the first 256 bytes, because parsers decide most by
    headers."""
    end = min(len(content), 256) if rng.random() < 0.5 else len(content)
    return rng.randrange(end) if end else 0


def _flip(content: bytearray, rng: random.Random) -> None:
    if content:
        content[_at(content, rng)] ^= 1 << rng.randrange(8)


def _truncate(content: bytearray, rng: random.Random) -> None:
    del content[_at(content, rng) :]


def _cut(content: bytearray, rng: random.Random) -> None:
    place = _at(content, rng)
    del content[place : place + rng.randint(1, 64)]


def _repeat(content: bytearray, rng: random.Random) -> None:
    place = _at(content, rng)
    content[place:place] = content[place : place + rng.randint(1, 64)]


def _overwrite(content: bytearray, rng: random.Random) -> None:
    place, length = _at(content, rng), rng.choice((1, 2, 4, 8, 32))
    content[place : place + length] = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))


def _append(content: bytearray, rng: random.Random) -> None:
    content += rng.randbytes(rng.randint(1, 64))


_EDITS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(_flip, _flip, _overwrite, _overwrite, _truncate, _cut, _repeat, _append),
)


def damaged_document(document: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON document with one to three random changes: values that are replaced, and keys or elements
    that are removed, added or doubled."""
    changed = {"root": copy.deepcopy(document)}
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(_places(changed)))
        kind = rng.random()
        if kind < 0.65:
            holder[key] = hostile_value(rng)
        elif kind < 0.8 and holder is not changed:
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif holder is not changed:
            holder[rng.choice(("extra", "", "__class__", "../x"))] = hostile_value(rng)
    return changed["root"]


def hostile_value(rng: random.Random) -> Any:
    if rng.random() < 0.02:
        return DEEP
    return copy.deepcopy(rng.choice(HOSTILE))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return a pair (container, key or index) for each value in a JSON document."""
    result, open_ = [], [value]
    while open_:
        holder = open_.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        result += [(holder, key) for key in keys]
        open_ += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return result
