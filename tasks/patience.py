"""Retry calls to MLflow while it does not answer: warn at once, retry for as long as the caller allows, then raise."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, ParamSpec, TypeVar

from mlflow.exceptions import MlflowException, RestException
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

from armature.components.contracts.errors import TrackingError
from armature.components.contracts.secrets import without_passwords

P = ParamSpec("P")
T = TypeVar("T")

AGAIN_SECONDS = 2.0
"""Seconds between two tries of a call."""
_SERVER_FAILS = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "INTERNAL_ERROR")
_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_STORES = ("boto3", "botocore", "s3transfer")

_seconds = ContextVar("seconds", default=300.0)
"""Seconds for which a call to MLflow is retried; `patience` sets them."""
_log = logging.getLogger("prefect.mlflow")


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Set for how many seconds this thread retries a call to MLflow in this block.

    A single call that hangs is ended by MLflow's own timeout.
    """
    before = _seconds.set(seconds)
    try:
        yield
    finally:
        _seconds.reset(before)


def patiently(uri: str, call: Callable[P, T]) -> Callable[P, T]:
    """Wrap a call to MLflow so that it is retried while MLflow, its database or its file store does not answer.

    It is also made again, once, if another process inserted the same row into the database at the same time.

    Args:
        uri: MLflow's address, for messages.
        call: a function that calls MLflow.

    Raises:
        TrackingError: (from the wrapped call) MLflow did not answer in time, or refused access. MLflow's errors about
            the call itself are raised unchanged.

    Example:
        >>> patiently("http://127.0.0.1:5000", len)([1, 2])
        2
    """

    def calling(*args: P.args, **kwargs: P.kwargs) -> T:
        began, warned, raced = time.monotonic(), False, False
        while True:
            try:
                answer = call(*args, **kwargs)
            except Exception as error:
                if not raced and "IntegrityError" in str(error):
                    raced = True  # another process inserted the same row first; now the call finds that row
                    continue
                if (trouble := _trouble(error)) is None:
                    raise
                waited = time.monotonic() - began
                message = without_passwords(str(error).partition("\n")[0])[:300]
                if trouble == "refused" or waited + AGAIN_SECONDS > _seconds.get():
                    what = "refuses access" if trouble == "refused" else f"does not answer (tried for {waited:.0f} s)"
                    raise TrackingError(
                        f"MLflow {what}: {message}",
                        where=f"MLFLOW_TRACKING_URI = {uri}",
                        remedy="start MLflow, correct MLFLOW_TRACKING_URI or free its disk, then run again: finished "
                        "artifacts are kept, and their records are completed",
                    ) from error
                if not warned:
                    _log.warning("MLflow (%s) does not answer, retrying for %.0f s: %s", uri, _seconds.get(), message)
                warned = True
                time.sleep(AGAIN_SECONDS)
            else:
                if warned:
                    _log.warning("MLflow (%s) answers again", uri)
                return answer

    return calling


def _trouble(error: Exception) -> Literal["passing", "refused"] | None:
    """Classify an error of a call to MLflow.

    Returns "passing" if MLflow, its database or its file store may answer later, "refused" if it denies access, and
    None if the call itself was wrong.
    """
    if isinstance(error, MlflowException):
        if error.error_code in _REFUSALS:
            return "refused"
        asked = isinstance(error, RestException) or "OperationalError" in str(error)
        if error.error_code in _SERVER_FAILS and (asked or "API request" in str(error)):
            return "passing"
        return "refused" if not asked and str(error).startswith("API request") else None
    if isinstance(error, RequestException | SQLAlchemyError) or type(error).__module__.partition(".")[0] in _STORES:
        return "passing"
    if isinstance(error, OSError):
        return "passing" if error.errno in _DISK else "refused"
    return None
