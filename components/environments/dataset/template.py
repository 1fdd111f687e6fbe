"""Templates with places for columns and images: "{image}How many {things[0]}?".

{{ and }} are literal braces. {"a [b]"}, a JSON string, is a column whose name has brackets or braces or is image.
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
    """Return a column's name in Unicode's normal form NFC, so that names which look equal are equal."""
    return unicodedata.normalize("NFC", name)


class Place(Enum):
    """A place for images in a template: for the row's next image, or for all remaining ones."""

    IMAGE = "image"
    IMAGES = "images"


@dataclass(frozen=True)
class Column:
    """A reference to a column, or to item `item` of the list in it.

    `whole` is the text as written, such as "a[0]"; a column of exactly that name is preferred.
    """

    name: str
    item: int | None = None
    whole: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Alternative names of the column, of which one has to exist."""
        return (self.name,) if self.whole is None else (self.name, self.whole)

    def value(self, row: Mapping[str, Any]) -> Any:
        """Return a row's value in this column, or the value of the item.

        Raises:
            BadRow: the column is not a list with such an item.
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
    """A parsed template: literal texts, columns and places of images in order."""

    parts: tuple[str | Column | Place, ...]

    @property
    def places(self) -> bool:
        """True if the template has a place for an image."""
        return any(isinstance(part, Place) for part in self.parts)

    @property
    def columns(self) -> list[Column]:
        """The columns of the template in order."""
        return [part for part in self.parts if isinstance(part, Column)]

    def fill(self, row: Mapping[str, Any], image_token: str = "") -> list[str | Place]:
        """Replace columns by the row's values. `image_token` in a value becomes a place for an image.

        Raises:
            BadRow: a value is missing, or is not text, a number, or a list of texts and numbers.
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
    """Parse the text of a template.

    Raises:
        ValueError: a brace has no counterpart, {} is empty, or a quoted name is not a JSON string.

    Example:
        >>> template = parse_template("{image}How many {things[0]}?")
        >>> template.fill({"things": ["cats", "dogs"]})
        [<Place.IMAGE: 'image'>, 'How many ', 'cats', '?']
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
                f"{token} at character {match.start()} does not name a column; write {{{{ or }}}} for a brace, and "
                '{"NAME"} for a column whose name has braces'
            )
        else:
            parts += [literal] if literal else []
            literal = ""
            parts.append(_parse_place(match))
    literal += text[end:]
    return Template((*parts, literal) if literal else tuple(parts))


def _parse_place(match: re.Match[str]) -> Column | Place:
    if match["quoted"]:
        return Column(column_name(json.loads(match["quoted"])), int(match["item"]) if match["item"] else None)
    name = column_name(match["plain"])
    if name in ("image", "images"):
        return Place(name)
    item = _ITEM.fullmatch(name)
    return Column(name) if item is None else Column(item[1], int(item[2]), name)


def split_at(image_token: str, text: str) -> Iterator[str | Place]:
    """Split `text` at each `image_token` and yield the pieces with a place for an image between them."""
    for number, piece in enumerate(text.split(image_token) if image_token else [text]):
        if number:
            yield Place.IMAGE
        yield piece


def as_text(value: Any, column: str) -> str:
    """Return a value as text for a prompt. A list becomes lines that begin with A., B., ..., as choices are shown.

    Raises:
        BadRow: the value is missing, or is not text, a number, or a list of texts and numbers.
    """
    if isinstance(value, list | tuple):
        if not 0 < len(value) <= len(ascii_uppercase):
            raise BadRow("wrong_type", f"{column!r} is a list of {len(value)} values")
        lines = zip(ascii_uppercase, value, strict=False)
        return "\n".join(f"{letter}. {scalar_text(each, column)}" for letter, each in lines)
    return scalar_text(value, column)


def scalar_text(value: Any, column: str) -> str:
    """Return a text or a number of a column as text.

    Raises:
        BadRow: the value is null (`no_text`), or is neither text nor a number (`wrong_type`).
    """
    if value is None:
        raise BadRow("no_text", f"{column!r} is null")
    try:
        return value_text(value)
    except ValueError:
        raise BadRow("wrong_type", f"{column!r} is {type(value).__name__}, not text or a number") from None
