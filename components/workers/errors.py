"""What goes wrong with a worker, and which errors of its handler come back as they are."""

from __future__ import annotations

from typing import Any

from armature.components.contracts.errors import ArmatureError, ConfigurationError, DataError


class WorkerError(ArmatureError):
    """A worker ended, hung, failed or answered nonsense, and its state is gone. Or it is gone since an earlier call."""

    code = "worker_failed"


class IdleWorkerLost(WorkerError):
    """A worker was lost between two calls. The latter was not sent, and can be made again."""

    code = "idle_worker_lost"


_KNOWN = {kind.__name__: kind for kind in (ConfigurationError, DataError, WorkerError, IdleWorkerLost)}


def described(error: ArmatureError) -> list[str]:
    """The nearest kind that the other side knows, the code, and the three parts."""
    kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _KNOWN), WorkerError.__name__)
    return [kind, error.code, error.what, error.where, error.remedy]


def restored(description: Any) -> ArmatureError:
    """Raises ValueError if it is not what `described` gives."""
    match description:
        case [str() as kind, str() as code, str() as what, str() as where, str() as remedy]:
            return _KNOWN.get(kind, WorkerError)(what, code=code, where=where, remedy=remedy)
    raise ValueError("an error without its parts")
