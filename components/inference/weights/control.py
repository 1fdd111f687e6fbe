"""vLLM's weight-transfer routes (0.26 and newer), called by the trainer on all servers at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.replies import BadReply, Reply, exchange_blocking

Packing = Literal["init", "update"] | None
_PACKING: dict[str, Packing] = {"0.26.": "update", "0.32.": "init"}
"""vLLM moved it from the one route to the other between these; servers of other versions get tensor after tensor."""


class ServerControl:
    """Posts to every endpoint in parallel; each call returns futures that raise WeightSyncError."""

    def __init__(self, endpoints: Sequence[Endpoint], timeout: float) -> None:
        self.endpoints, self._timeout = list(endpoints), timeout
        self._http = httpx.Client(timeout=timeout, trust_env=False)
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(self.endpoints)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def close(self, wait: bool = False) -> None:
        """No more calls; `wait` for those that are posted."""
        self._threads.shutdown(wait=wait, cancel_futures=True)
        self._http.close()

    def world_sizes(self) -> list[int]:
        """GPUs of each server."""
        sizes = []
        for endpoint in self.endpoints:
            reply = self._exchange("GET", endpoint, "/get_world_size")
            size = reply.document.get("world_size")
            if type(size) is not int or size < 1:
                raise WeightSyncError(
                    f"/get_world_size answered {reply.text}", code="invalid_world_size", where=endpoint.url
                )
            sizes.append(size)
        return sizes

    def packing(self) -> Packing:
        """Whether all servers take many tensors in one buffer, and where they want to be told so."""
        found = set()
        for endpoint in self.endpoints:
            version = str(self._exchange("GET", endpoint, "/version").document.get("version"))
            found.add(next((way for known, way in _PACKING.items() if version.startswith(known)), None))
        return found.pop() if len(found) == 1 else None

    def post(self, path: str, bodies: Sequence[Any]) -> list[Future[None]]:
        """Post `bodies[i]` to endpoint i, all at once."""
        return [
            self._threads.submit(self._post, endpoint, path, body)
            for endpoint, body in zip(self.endpoints, bodies, strict=True)
        ]

    def post_all(self, path: str, body: Any = None) -> None:
        """Post the same to all and wait for all."""
        for future in self.post(path, [body] * len(self.endpoints)):
            future.result()

    def _post(self, endpoint: Endpoint, path: str, body: Any) -> None:
        self._exchange("POST", endpoint, path, body)

    def _exchange(self, method: str, endpoint: Endpoint, path: str, body: Any = None) -> Reply:
        url = f"{endpoint.url}{path}"
        try:
            reply = exchange_blocking(self._http, method, url, endpoint.headers, self._timeout, body)
        except (httpx.TransportError, BadReply) as error:
            raise WeightSyncError(
                f"{path}: {error!r}", code="sync_connection_lost", where=endpoint.url, remedy="read the server's log"
            ) from error
        if reply.status != 200:
            raise WeightSyncError(
                f"{path} answered {reply.status}: {reply.text}",
                code="server_refuses_weights",
                where=endpoint.url,
                remedy="read the server's log",
            )
        return reply
