"""Shared libraries without what is not loaded."""

from __future__ import annotations

import struct

_SEGMENT = struct.Struct("<IIQQQQQQ")


def loadable_part(library: bytes) -> bytes:
    """The beginning of a 64-bit little-endian ELF file up to the end of its last segment.

    The loader needs program headers and segments; sections, debug information above all, come after them. Anything
    that is not such a file is returned as it is.
    """
    if library[:6] != b"\x7fELF\x02\x01":
        return library
    (offset,) = struct.unpack_from("<Q", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    segments = (_SEGMENT.unpack_from(library, offset + index * size) for index in range(count))
    return library[: max(start + length for _, _, start, _, _, length, _, _ in segments)]
