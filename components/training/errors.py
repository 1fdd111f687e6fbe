"""Errors between the processes of a trainer service and its client, as JSON."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

from armature.components.contracts import errors
from armature.components.contracts.errors import ArmatureError, TrainerError


class FatalServiceError(Exception):
    """Ends the service; its cause is what went wrong."""


def describe(error: BaseException) -> dict[str, str]:
    """The class, its code and three parts if it has them, and where it came from."""
    document = {
        "class": type(error).__name__,
        "what": f"{type(error).__name__}: {error}",
        "code": "",
        "where": "",
        "remedy": "",
        "traceback": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, ArmatureError):
        document |= {"what": error.what, "code": error.code, "where": error.where, "remedy": error.remedy}
    return document


def rebuild(document: Any) -> ArmatureError:
    """The error that `describe` described; a TrainerError with the traceback if it was not one of ours."""
    parts = document if isinstance(document, dict) else {}
    name, what, code, where, remedy, origin = (
        str(parts.get(key, "")) for key in ("class", "what", "code", "where", "remedy", "traceback")
    )
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ArmatureError):
        return kind(what, code=code, where=where, remedy=remedy)
    return TrainerError(f"the trainer failed: {what or 'it does not say why'}", where=origin)


def read_error(file: Path) -> dict[str, Any] | None:
    """The document in `file` that a rank wrote before it ended; None if there is none, or only a part of it."""
    try:
        document = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
