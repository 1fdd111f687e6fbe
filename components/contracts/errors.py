"""Errors in three parts: what is wrong, where, and what to do."""

from __future__ import annotations

from armature.components.contracts.secret_values import blanked


class ArmatureError(Exception):
    """The base of every error that a user can act on.

    `code` is the stable name of the problem, the same in every version; `docs/errors.md` lists all. A raise that gives
    none has the code of its class. Programs and tests compare it, sentences may change. `what` is the problem in one
    sentence, `where` the file, row, field or server that has it, `remedy` what to do about it.

    Example:
        >>> error = DataError("the file is empty", code="empty_file", where="prompts.jsonl")
        >>> error.code, error.where
        ('empty_file', 'prompts.jsonl')
    """

    code: str = "error"

    def __init__(self, what: str, *, code: str = "", where: str = "", remedy: str = "") -> None:
        what, where, remedy = blanked(what), blanked(where), blanked(remedy)
        self.what, self.where, self.remedy = what, where, remedy
        self.code = code or type(self).code
        parts = [what, f"  where: {where}" if where else "", f"  what to do: {remedy}" if remedy else ""]
        super().__init__("\n".join(part for part in parts if part))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.code, self.where, self.remedy))


def _rebuild(kind: type[ArmatureError], what: str, code: str, where: str, remedy: str) -> ArmatureError:
    return kind(what, code=code, where=where, remedy=remedy)


class ConfigurationError(ArmatureError):
    """A setting is unknown, missing, or contradicts another."""

    code = "invalid_configuration"


class DataError(ArmatureError):
    """A table, an image, an artifact or a checkpoint is not what it should be."""

    code = "invalid_data"


class StoreError(DataError):
    """The artifact store, or its remote copy, could not be read or written; what was finished is kept."""

    code = "store_failed"


class ServerError(ArmatureError):
    """A model server did not start, died, or answered wrongly."""

    code = "server_failed"


class WeightSyncError(ServerError):
    """The new weights did not reach every server; the run stops."""

    code = "weight_sync_failed"


class TrainerError(ArmatureError):
    """The trainer service failed or died."""

    code = "trainer_failed"


class TrackingError(ArmatureError):
    """MLflow could not be reached or written; what a run made is kept."""

    code = "tracking_failed"


class DivergedError(ArmatureError):
    """The training went wrong in a way that starting again does not heal."""

    code = "diverged"


class MismatchError(ArmatureError):
    """Trainer and server disagree, on log-probs or on texts; training would go wrong without knowing it."""

    code = "mismatch"
