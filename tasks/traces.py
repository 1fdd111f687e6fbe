"""Send Prefect's OpenTelemetry spans of flow and task runs to a collector."""

from __future__ import annotations

import os

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from armature.components.contracts.errors import ConfigurationError


def provider() -> TracerProvider:
    """Return the tracer provider that `OTEL_PYTHON_TRACER_PROVIDER=armature` selects.

    It sends spans by OTLP over HTTP in the background. OpenTelemetry's other environment variables set the collector's
    address and further options.

    Raises:
        ConfigurationError: the OTLP exporter is not installed.
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
