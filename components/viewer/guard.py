"""Who may see the page: whoever has the token that `armature view` printed."""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "armature-view"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; media-src 'self'; style-src 'self'; "
    "script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSAL = "open the address that `armature view` printed: it has a token"
ASK = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Armature: token</title></head>
<body><h1>Armature</h1>
<p>This page needs the token of the viewer: {refusal}, or enter the token here.</p>
<form action="/" method="get">{run}
<label>Token <input name="token" type="password" autocomplete="off" autofocus></label>
<button>Open</button></form></body></html>
"""


class Guard:
    """Lets in who gives the token in the address, which becomes a cookie, in that cookie or as a bearer.

    A link without it, `/?run=...`, asks for it.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        cookie = f"{COOKIE}-{scope['server'][1]}"
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        known = self._is_token(request.cookies.get(cookie, "")) or self._is_token(bearer)
        at_door, run = request.url.path == "/", _run(request)
        given = at_door and self._is_token(request.query_params.get("token", ""))
        if given or (known and at_door and request.url.query):
            response: Response = RedirectResponse(f"/#run={run}" if run else "/", 303, headers=HEADERS)
            if given:
                response.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send)
        elif known:
            await self._app(scope, receive, _with_headers(send))
        else:
            await _refusal(at_door, run)(scope, receive, send)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _run(request: Request) -> str:
    """The run that the link names, by the beginning of its fingerprint; "" for anything else."""
    given = request.query_params.get("run", "")
    return given if re.fullmatch("[0-9a-f]{1,64}", given) else ""


def _refusal(at_door: bool, run: str) -> Response:
    if not at_door:
        return PlainTextResponse(f"{REFUSAL}\n", 401, headers=HEADERS)
    field = f'<input type="hidden" name="run" value="{run}">' if run else ""
    return HTMLResponse(ASK.format(refusal=REFUSAL, run=field), 401, headers=HEADERS)


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            given = {name for name, _ in message["headers"]}
            ours = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*message["headers"], *(pair for pair in ours if pair[0] not in given)]
        await send(message)

    return send_with_headers
