"""Errors between the processes of a trainer service and its client, as JSON."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

from components.contracts import errors
from components.contracts.errors import ArmatureError, TrainerError


class FatalServiceError(Exception):
    """Ends the service; its cause is what went wrong."""


def describe(error: BaseException) -> dict[str, str]:
    """The class, its three parts if it has them, and where it came from."""
    document = {
        "class": type(error).__name__,
        "what": f"{type(error).__name__}: {error}",
        "where": "",
        "remedy": "",
        "traceback": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, ArmatureError):
        document |= {"what": error.what, "where": error.where, "remedy": error.remedy}
    return document


def rebuild(document: Mapping[str, str]) -> ArmatureError:
    """The error that `describe` described; a TrainerError with the traceback if it was not one of ours."""
    kind = getattr(errors, document["class"], None)
    if isinstance(kind, type) and issubclass(kind, ArmatureError):
        return kind(document["what"], where=document.get("where", ""), remedy=document.get("remedy", ""))
    return TrainerError(f"the trainer failed: {document['what']}", where=document.get("traceback", ""))
