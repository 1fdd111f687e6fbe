"""The middleware inside the server: no route but liveness without the key."""

from __future__ import annotations

import importlib
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

SERVED = Path(__file__).parents[2] / "components/inference/served"


async def answer(_: Request) -> PlainTextResponse:
    return PlainTextResponse("inside")


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/health", None, 200),
        ("/collective_rpc", None, 401),
        ("/collective_rpc", "Bearer wrong", 401),
        ("/collective_rpc", "right", 401),
        ("/collective_rpc", "Bearer right", 200),
        ("/v1/models", None, 401),
        ("/health/collective_rpc", None, 401),
    ],
)
async def test_every_route_needs_the_key(path, key, status, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    monkeypatch.syspath_prepend(SERVED)
    require_key = importlib.import_module("armature_served.require_key")
    app = Starlette(routes=[Route("/{path:path}", answer)], middleware=[Middleware(require_key.RequireKey)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
        response = await http.get(path, headers={"Authorization": key} if key else {})
    assert response.status_code == status
    assert ("inside" in response.text) == (status == 200)
