"""Expected errors, by their code and the values that they show, so that sentences can be improved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pydantic import ValidationError

from armature.components.contracts.errors import ArmatureError
from armature.components.contracts.settings import InvalidTable


def codes(error: BaseException) -> set[str]:
    """Return the codes of an error: its attribute `code` or `reason`, or for a ValidationError the types of pydantic's
    problems and the codes of their causes."""
    if isinstance(error, InvalidTable):
        return codes(error.error)
    if isinstance(error, ValidationError):
        problems = [(each["type"], each.get("ctx", {}).get("error")) for each in error.errors()]
        named = (InvalidTable, ArmatureError)
        return set().union(*(codes(cause) if isinstance(cause, named) else {kind} for kind, cause in problems))
    return {str(getattr(error, "code", getattr(error, "reason", "")))}


@contextmanager
def refused(code: str, *values: object, kind: type[BaseException] = Exception) -> Iterator[pytest.ExceptionInfo]:
    """Check that the block raises an error with this code.

    Args:
        code: a code in `docs/errors.md`, or for a ValidationError the type of one of pydantic's problems.
        values: paths, names of fields and numbers that the error's text must contain. Sentences are never checked.
        kind: class of the error, needed only if the code does not determine it.

    Example:
        >>> from armature.components.contracts.errors import DataError
        >>> with refused("empty_file", "prompts.jsonl"):
        ...     raise DataError("the file is empty", code="empty_file", where="prompts.jsonl")
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    if code not in codes(error):
        raise AssertionError(f"expected the code {code!r}, not {sorted(codes(error))}") from error
    missing = [value for value in map(str, values) if value not in str(error)]
    if missing:
        raise AssertionError(f"the error does not show {missing}") from error
