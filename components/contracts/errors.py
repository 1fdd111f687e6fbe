"""Errors in three parts: what is wrong, where, and what to do."""

from __future__ import annotations

from components.contracts.secret_values import blanked


class ArmatureError(Exception):
    """The base of every error that a user can act on."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        what, where, remedy = blanked(what), blanked(where), blanked(remedy)
        self.what, self.where, self.remedy = what, where, remedy
        parts = [what, f"  where: {where}" if where else "", f"  what to do: {remedy}" if remedy else ""]
        super().__init__("\n".join(part for part in parts if part))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.remedy))


def _rebuild(kind: type[ArmatureError], what: str, where: str, remedy: str) -> ArmatureError:
    return kind(what, where=where, remedy=remedy)


class ConfigurationError(ArmatureError):
    """A setting is unknown, missing, or contradicts another."""


class DataError(ArmatureError):
    """A table, an image, an artifact or a checkpoint is not what it should be."""


class StoreError(DataError):
    """The artifact store, or its remote copy, could not be read or written; what was finished is kept."""


class ServerError(ArmatureError):
    """A model server did not start, died, or answered wrongly."""


class WeightSyncError(ServerError):
    """The new weights did not reach every server; the run stops."""


class TrainerError(ArmatureError):
    """The trainer service failed or died."""


class TrackingError(ArmatureError):
    """MLflow could not be reached or written; what a run made is kept."""


class DivergedError(ArmatureError):
    """The training went wrong in a way that starting again does not heal."""


class MismatchError(ArmatureError):
    """Trainer and server disagree, on log-probs or on texts; training would go wrong without knowing it."""
