"""Texts with places for columns and images: "{image}How many {things[0]}?"; {{ and }} are braces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from string import ascii_uppercase
from typing import Any

from components.contracts.value_text import value_text
from components.environments.dataset.bad_rows import BadRow

_ITEM = re.compile(r"(.+)\[(\d{1,4})\]")
_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class Place(Enum):
    """Where images stand: the next one, or all that are left."""

    IMAGE = "image"
    IMAGES = "images"


@dataclass(frozen=True)
class Template:
    """Literal texts, columns, items of columns that are lists, and places of images in their order."""

    parts: tuple[tuple[str, str] | Place, ...]  # ("text", text), ("column", name) or a place

    @property
    def places(self) -> bool:
        return any(isinstance(part, Place) for part in self.parts)

    @property
    def columns(self) -> list[str]:
        named = [part[1] for part in self.parts if isinstance(part, tuple) and part[0] == "column"]
        return [match[1] if (match := _ITEM.fullmatch(name)) else name for name in named]

    def fill(self, row: Mapping[str, Any], image_token: str = "") -> list[str | Place]:
        """With the row's values; `image_token` in a value is a place of an image.

        Raises:
            BadRow: a value is missing, or is not text, a number, or a list of those.
        """
        filled: list[str | Place] = []
        for part in self.parts:
            if isinstance(part, Place):
                filled.append(part)
            elif part[0] == "text":
                filled.append(part[1])
            else:
                filled += split_at(image_token, as_text(_value(row, part[1]), part[1]))
        return filled


def _value(row: Mapping[str, Any], name: str) -> Any:
    match = _ITEM.fullmatch(name)
    if match is None:
        return row.get(name)
    items, index = row.get(match[1]), int(match[2])
    if not isinstance(items, list | tuple) or index >= len(items):
        raise BadRow("no_text", f"{match[1]!r} is {items!r:.100}, which has no item {index}")
    return items[index]


@lru_cache(maxsize=64)
def parse_template(text: str) -> Template:
    """
    Raises:
        ValueError: a brace without its other one, or {}.
    """
    parts: list[tuple[str, str] | Place] = []
    literal, end = "", 0
    for match in _TOKEN.finditer(text):
        literal += text[end : match.start()]
        end, token = match.end(), match.group()
        if token in ("{{", "}}"):
            literal += token[0]
        elif not match[1]:
            raise ValueError(f"{token} at character {match.start()} names no column; write {{{{ or }}}} for a brace")
        else:
            parts += [("text", literal)] if literal else []
            literal = ""
            parts.append(Place(match[1]) if match[1] in ("image", "images") else ("column", match[1]))
    literal += text[end:]
    return Template((*parts, ("text", literal)) if literal else tuple(parts))


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
