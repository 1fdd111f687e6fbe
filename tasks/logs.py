"""Make Prefect's logs readable: our errors without a traceback, and no line for each finished unit of a stage."""

from __future__ import annotations

import logging

from armature.components.contracts.errors import ArmatureError
from armature.components.contracts.installation import installation_error

_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


class _ReadableFilter(logging.Filter):
    """Removes the tracebacks of our own errors, and the lines that say that a unit of a stage has finished."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, ArmatureError):
            error = installation_error(error)
        if isinstance(error, ArmatureError):
            record.msg, record.args = f"{error}", ()
            record.exc_info, record.exc_text = None, None
        kind, run = getattr(record, "task_name", ""), str(getattr(record, "task_run_name", ""))
        is_unit = run.removeprefix(f"{kind}-").isdigit()
        return not (is_unit and record.levelno <= logging.INFO and "Finished in state" in record.getMessage())


def readable_errors() -> None:
    """Make the logs of flow runs and task runs readable: add `_ReadableFilter` to their loggers, once."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _ReadableFilter) for each in logger.filters):
            logger.addFilter(_ReadableFilter())


class TerminalFilter(logging.Filter):
    """Leaves errors of flow and task runs out of the terminal, because the command prints the error once at its end.

    Links to Prefect's pages are left out too, unless the server of the run `has_pages`.
    """

    def __init__(self, has_pages: bool) -> None:
        super().__init__()
        self._has_pages = has_pages

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the terminal shows the record."""
        if not record.name.startswith(_LOGGERS):
            return True
        text = record.getMessage()
        is_error = record.levelno >= logging.ERROR or text.startswith("Finished in state Failed")
        return not is_error and (self._has_pages or not text.startswith("View at "))
