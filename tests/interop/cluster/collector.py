"""A receiver of OTLP over HTTP, as an OpenTelemetry collector is one, with OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces


@dataclass
class Collector:
    requests: list[traces.ExportTraceServiceRequest] = field(default_factory=list)

    @property
    def spans(self) -> list[Any]:
        resources = [each for request in self.requests for each in request.resource_spans]
        return [span for each in resources for scope in each.scope_spans for span in scope.spans]

    @property
    def services(self) -> set[str]:
        """Names of the services that have sent spans."""
        resources = [each.resource for request in self.requests for each in request.resource_spans]
        return {a.value.string_value for each in resources for a in each.attributes if a.key == "service.name"}


class _Handler(BaseHTTPRequestHandler):
    collector: ClassVar[Collector]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
        self.collector.requests.append(traces.ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(traces.ExportTraceServiceResponse().SerializeToString())

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests: the collector has their spans."""


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """Run an OTLP receiver of traces while the block runs. Yield its address and the collector of its requests."""
    collector = Collector()
    handler = type("Handler", (_Handler,), {"collector": collector})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", collector
        finally:
            server.shutdown()
