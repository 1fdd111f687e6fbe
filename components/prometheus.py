"""Numbers at an address, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server

from armature.components.contracts.errors import ConfigurationError


@contextmanager
def metrics_server(address: str, registry: CollectorRegistry, where: str) -> Iterator[str]:
    """Answer GET /metrics at `address` ("host:port", port 0 for a free one) within the block; gives the URL.

    Args:
        where: The setting that has the address.

    Raises:
        ConfigurationError: nothing can listen there.
    """
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"metrics cannot be served: {error}",
            where=where,
            remedy="give an address of this machine and a free port; port 0 takes any",
        ) from error
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
