"""Logs that a person can read, and spans of runs for OpenTelemetry."""

from __future__ import annotations

import logging
import os

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from armature.components.contracts.errors import ArmatureError, ConfigurationError

# Logs that a person can read: our own errors in their three parts, and not one line per finished unit.

_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


class _ReadableFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ArmatureError):
            record.msg, record.args = f"{error}", ()
            record.exc_info, record.exc_text = None, None
        kind, run = getattr(record, "task_name", ""), str(getattr(record, "task_run_name", ""))
        is_unit = run.removeprefix(f"{kind}-").isdigit()
        return not (is_unit and record.levelno <= logging.INFO and "Finished in state" in record.getMessage())


def readable_errors() -> None:
    """Filter the loggers of flow and task runs; once is enough."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _ReadableFilter) for each in logger.filters):
            logger.addFilter(_ReadableFilter())


# Spans of flow and task runs, which Prefect makes for OpenTelemetry, sent to a collector.


def provider() -> TracerProvider:
    """What `OTEL_PYTHON_TRACER_PROVIDER=armature` names: spans are sent by OTLP over HTTP in the background, as
    OpenTelemetry's other variables say.

    Raises:
        ConfigurationError: what sends them is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigurationError(
            f"traces cannot be sent: {error}",
            code="opentelemetry_missing",
            where="OTEL_PYTHON_TRACER_PROVIDER",
            remedy="pip install 'armature-vla[otel]', or unset the variable",
        ) from error
    os.environ.setdefault("OTEL_SERVICE_NAME", "armature")
    tracer_provider = TracerProvider()
    tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return tracer_provider
