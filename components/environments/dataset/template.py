"""Texts with places for columns and images: "{image}How many {things[0]}?"; {{ and }} are braces.

{"a [b]"} is the column of any name, a JSON string: one with brackets or braces, or one called image.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from string import ascii_uppercase
from typing import Any

from armature.components.contracts.value_text import value_text
from armature.components.environments.dataset.bad_rows import BadRow

_ITEM = re.compile(r"(.+)\[(\d{1,4})\]")
_TOKEN = re.compile(
    r'\{\{|\}\}|\{(?P<quoted>"(?:[^"\\]|\\.)*")(?:\[(?P<item>\d{1,4})\])?\}'
    r"|\{(?P<plain>(?:[^{}]|\{[^{}]*\})*)\}|[{}]"
)


def column_name(name: str) -> str:
    """A name as columns are compared: what looks the same is the same, however its accents are stored (NFC)."""
    return unicodedata.normalize("NFC", name)


class Place(Enum):
    """Where images stand: the next one, or all that are left."""

    IMAGE = "image"
    IMAGES = "images"


@dataclass(frozen=True)
class Column:
    """A column of the row, or item `item` of the list in it. A column of the name `whole` comes before an item."""

    name: str
    item: int | None = None
    whole: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of which one suffices."""
        return (self.name,) if self.whole is None else (self.name, self.whole)

    def value(self, row: Mapping[str, Any]) -> Any:
        """
        Raises:
            BadRow: the list has no such item.
        """
        if self.whole is not None and self.whole in row:
            return row[self.whole]
        if self.item is None:
            return row.get(self.name)
        items = row.get(self.name)
        if not isinstance(items, list | tuple) or self.item >= len(items):
            raise BadRow("no_text", f"{self.name!r} is {items!r:.100}, which has no item {self.item}")
        return items[self.item]


@dataclass(frozen=True)
class Template:
    """Literal texts, columns and places of images in their order."""

    parts: tuple[str | Column | Place, ...]

    @property
    def places(self) -> bool:
        return any(isinstance(part, Place) for part in self.parts)

    @property
    def columns(self) -> list[Column]:
        return [part for part in self.parts if isinstance(part, Column)]

    def fill(self, row: Mapping[str, Any], image_token: str = "") -> list[str | Place]:
        """With the row's values; `image_token` in a value is a place of an image.

        Raises:
            BadRow: a value is missing, or is not text, a number, or a list of those.
        """
        filled: list[str | Place] = []
        for part in self.parts:
            if isinstance(part, Column):
                filled += split_at(image_token, as_text(part.value(row), part.name))
            else:
                filled.append(part)
        return filled


@lru_cache(maxsize=64)
def parse_template(text: str) -> Template:
    """
    Raises:
        ValueError: a brace without its other one, or {}, or a quoted name that is not a JSON string.
    """
    parts: list[str | Column | Place] = []
    literal, end = "", 0
    for match in _TOKEN.finditer(text):
        literal += text[end : match.start()]
        end, token = match.end(), match.group()
        if token in ("{{", "}}"):
            literal += token[0]
        elif not match["quoted"] and not match["plain"]:
            raise ValueError(
                f"{token} at character {match.start()} names no column; write {{{{ or }}}} for a brace, and "
                '{"NAME"} for a column whose name has braces'
            )
        else:
            parts += [literal] if literal else []
            literal = ""
            parts.append(_place(match))
    literal += text[end:]
    return Template((*parts, literal) if literal else tuple(parts))


def _place(match: re.Match[str]) -> Column | Place:
    if match["quoted"]:
        return Column(column_name(json.loads(match["quoted"])), int(match["item"]) if match["item"] else None)
    name = column_name(match["plain"])
    if name in ("image", "images"):
        return Place(name)
    item = _ITEM.fullmatch(name)
    return Column(name) if item is None else Column(item[1], int(item[2]), name)


def split_at(image_token: str, text: str) -> Iterator[str | Place]:
    """`text`, in which `image_token` stands for an image."""
    for number, piece in enumerate(text.split(image_token) if image_token else [text]):
        if number:
            yield Place.IMAGE
        yield piece


def as_text(value: Any, column: str) -> str:
    """How a value is written into a prompt: a list as lines with letters, as choices are shown.

    Raises:
        BadRow: it is missing, or is not text, a number, or a list of those.
    """
    if isinstance(value, list | tuple):
        if not 0 < len(value) <= len(ascii_uppercase):
            raise BadRow("wrong_type", f"{column!r} is a list of {len(value)} values")
        lines = zip(ascii_uppercase, value, strict=False)
        return "\n".join(f"{letter}. {_scalar(each, column)}" for letter, each in lines)
    return _scalar(value, column)


def _scalar(value: Any, column: str) -> str:
    if value is None:
        raise BadRow("no_text", f"{column!r} is null")
    try:
        return value_text(value)
    except ValueError:
        raise BadRow("wrong_type", f"{column!r} is {type(value).__name__}, not text or a number") from None
