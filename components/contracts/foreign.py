"""Files that somebody else wrote, read by libraries that somebody else wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from armature.components.contracts.errors import ArmatureError, DataError


@contextmanager
def foreign(what: str, *, where: str, remedy: str = "") -> Iterator[None]:
    """Within, whatever a library raises of a damaged file is a DataError; errors of ours pass as they are."""
    try:
        yield
    except (ArmatureError, MemoryError):
        raise
    except Exception as error:
        detail = " ".join(str(error).split())[:500]
        raise DataError(
            f"{what}: {type(error).__name__}: {detail}", code="foreign_file_unreadable", where=where, remedy=remedy
        ) from error
