"""MLflow out of reach: said at once, tried again for as long as the caller can wait, then an error of ours."""

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
_SERVER_FAILS = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "INTERNAL_ERROR")
_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_STORES = ("boto3", "botocore", "s3transfer")

_seconds = ContextVar("seconds", default=300.0)
_log = logging.getLogger("prefect.mlflow")


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """How long calls inside wait for MLflow, in this thread; a call that hangs ends by MLflow's own timeout."""
    before = _seconds.set(seconds)
    try:
        yield
    finally:
        _seconds.reset(before)


def patiently(uri: str, call: Callable[P, T]) -> Callable[P, T]:
    """`call`, which asks MLflow at `uri`.

    Raises:
        TrackingError: MLflow did not answer in time, or refuses us. Other errors of MLflow are raised as they are.
    """

    def calling(*args: P.args, **kwargs: P.kwargs) -> T:
        began, told = time.monotonic(), False
        while True:
            try:
                answer = call(*args, **kwargs)
            except Exception as error:
                if (trouble := _trouble(error)) is None:
                    raise
                said, waited = without_passwords(str(error).partition("\n")[0])[:300], time.monotonic() - began
                if trouble == "refused" or waited + AGAIN_SECONDS > _seconds.get():
                    what = "refuses us" if trouble == "refused" else f"does not answer (tried for {waited:.0f} s)"
                    raise TrackingError(
                        f"MLflow {what}: {said}",
                        where=f"MLFLOW_TRACKING_URI = {uri}",
                        remedy="start it, correct MLFLOW_TRACKING_URI or free its disk, then run again: what was made "
                        "is kept, and its record is completed",
                    ) from error
                if not told:
                    _log.warning("MLflow (%s) does not answer, tried for %.0f s: %s", uri, _seconds.get(), said)
                told = True
                time.sleep(AGAIN_SECONDS)
            else:
                if told:
                    _log.warning("MLflow (%s) answers again", uri)
                return answer

    return calling


def _trouble(error: Exception) -> Literal["passing", "refused"] | None:
    """What is wrong with the way to MLflow, its database or its files; None: the question was wrong."""
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
