"""A client of Prefect's API that is no more easily put off than Prefect's own."""

from __future__ import annotations

import time
from typing import Any

import httpx


class PrefectApi(httpx.Client):
    """A client of Prefect's API that repeats a request after status 503. The server answers 503 while another request
    locks its SQLite database."""

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        deadline = time.monotonic() + 60
        while (response := super().send(request, **options)).status_code == 503 and time.monotonic() < deadline:
            time.sleep(0.5)
        return response
