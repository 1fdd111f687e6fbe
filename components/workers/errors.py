"""What goes wrong with a worker, and which errors of its handler come back as they are."""

from __future__ import annotations

from components.contracts.errors import ArmatureError, ConfigurationError, DataError


class WorkerError(ArmatureError):
    """A worker ended, hung, failed or answered nonsense, and its state is gone. Or it is gone since an earlier call."""


_KNOWN = {kind.__name__: kind for kind in (ConfigurationError, DataError, WorkerError)}


def described(error: ArmatureError) -> list[str]:
    """The nearest kind that the other side knows, and the three parts."""
    kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _KNOWN), WorkerError.__name__)
    return [kind, error.what, error.where, error.remedy]


def restored(description: list[str]) -> ArmatureError:
    """Raises ValueError or TypeError if it is not what `described` gives."""
    kind, what, where, remedy = map(str, description)
    return _KNOWN.get(kind, WorkerError)(what, where=where, remedy=remedy)
