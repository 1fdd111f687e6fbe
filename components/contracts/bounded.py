"""Files that others made, read only as far as a limit: nobody knows how many bytes a path gives before it is read."""

from __future__ import annotations

from pathlib import Path

from components.contracts.errors import DataError
from components.contracts.files import regular

LARGEST_DOCUMENT = 2**26
"""Bytes of a document that people or programs write, such as JSON."""


def read_bytes(path: Path, limit: int = LARGEST_DOCUMENT, remedy: str = "give a smaller one") -> bytes:
    """The content of a file of at most `limit` bytes.

    Raises:
        OSError: it cannot be read.
        DataError: it has more.
    """
    with regular(path).open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise DataError(f"the file has more than {limit} bytes", where=str(path), remedy=remedy)
    return content
