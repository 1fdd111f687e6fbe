"""Tokens with a text of their own in a checkpoint's tokenizer, read from its files without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import read_bytes

LARGEST_FILE = 2**28
TOKENIZER, CONFIG, SPECIAL, ADDED = FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
"""The files that name such tokens; a tokenizer has some of them."""


@dataclass(frozen=True)
class AddedToken:
    """A text that is one token wherever it stands. `special`: it is not part of texts, as the end of a turn."""

    text: str
    special: bool
    id: int | None = None


def added_tokens(folder: Path) -> list[AddedToken]:
    """The added tokens of the tokenizer in `folder`; one that several files name may be there several times.

    Raises:
        DataError: a file is not what a tokenizer saves.
    """
    found: list[AddedToken] = []
    for name in FILES:
        if (folder / name).is_file():
            try:
                found += _named(name, json.loads(read_bytes(folder / name, LARGEST_FILE)))
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
                raise DataError(
                    f"not a tokenizer's file: {type(error).__name__}: {str(error)[:200]}",
                    code="tokenizer_unreadable",
                    where=str(folder / name),
                    remedy="save the tokenizer again",
                ) from error
    return [token for token in found if token.text]


def _named(name: str, document: dict[str, Any]) -> Iterator[AddedToken]:
    if name == ADDED:
        yield from (AddedToken(text, False, int(number)) for text, number in document.items())
    elif name == TOKENIZER:
        for each in document.get("added_tokens") or ():
            yield AddedToken(str(each["content"]), bool(each.get("special")), int(each["id"]))
    else:
        for number, each in (document.get("added_tokens_decoder") or {}).items():
            yield AddedToken(str(each["content"]), bool(each.get("special")), int(number))
        for key, value in document.items():
            if key.endswith(("_token", "_tokens")):
                yield from (AddedToken(text, True) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    """Of a token as transformers saves it: its text, a dict with its `content`, or lists and dicts of those."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and "content" in value:
        yield str(value["content"])
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
