"""The viewer's web server: the page of a store and the JSON it requests, on loopback, protected by a token."""

from __future__ import annotations

import logging
import re
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.errors import ArmatureError, ConfigurationError, DataError
from armature.components.contracts.files import is_folder, regular
from armature.components.contracts.images import ImageRef
from armature.components.contracts.metrics import dump_json
from armature.components.machine.network import listener
from armature.components.pages.report import ASSETS, live_page, training_curves
from armature.components.viewer.address import announced
from armature.components.viewer.runs import MEDIA, ROBOT_TRAINING, Run, evaluations_of, find_runs, group_document
from armature.components.viewer.tables import LAST_STEP, Query, RolloutIndex, Side, Source

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
    """Middleware that admits requests with the viewer's token: in the address, in a cookie or as a bearer token.

    A token in the address is stored in a cookie. A link without the token, such as `/?run=...`, shows a form that asks
    for the token.
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
        admitted = self._is_token(request.cookies.get(cookie, "")) or self._is_token(bearer)
        at_root, run = request.url.path == "/", _run(request)
        in_address = at_root and self._is_token(request.query_params.get("token", ""))
        if in_address or (admitted and at_root and request.url.query):
            response: Response = RedirectResponse(f"/#run={run}" if run else "/", 303, headers=HEADERS)
            if in_address:
                response.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send)
        elif admitted:
            await self._app(scope, receive, _with_headers(send))
        else:
            await _refusal(at_root, run)(scope, receive, send)

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._token.encode())


def _run(request: Request) -> str:
    """Return the query parameter `run` of a link, which is a run's fingerprint or the beginning of one. Return "" if
    the parameter has another form."""
    run = request.query_params.get("run", "")
    return run if re.fullmatch("[0-9a-f]{1,64}", run) else ""


def _refusal(at_root: bool, run: str) -> Response:
    if not at_root:
        return PlainTextResponse(f"{REFUSAL}\n", 401, headers=HEADERS)
    field = f'<input type="hidden" name="run" value="{run}">' if run else ""
    return HTMLResponse(ASK.format(refusal=REFUSAL, run=field), 401, headers=HEADERS)


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            present = {name for name, _ in message["headers"]}
            defaults = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*message["headers"], *(pair for pair in defaults if pair[0] not in present)]
        await send(message)

    return send_with_headers


log = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound=BaseModel)

HERE = Path(__file__).parent / "assets"
FILES = {name: ASSETS / name for name in ("page.css", "rollout.js", "chart.js", "view.js")}
FILES |= {name: HERE / name for name in ("icon.svg", "robots.js")}
HOSTS = ["127.0.0.1", "localhost"]
REFRESH = 0.5
"""Seconds between two reads of the store. The page asks every second, so new rows are shown within two seconds."""
ROBOT_PAGES = "armature.components.robots.pages"
"""Name of the module that answers requests about runs of robot policies. It is imported by name, because only the
package `robots` may import `robots`."""


class ViewServer:
    """Answers the page's requests from an artifact store. A thread reads the store again and again, so that the page
    shows new steps of running runs."""

    def __init__(self, store: Path) -> None:
        self.store = store.resolve()
        self.index = RolloutIndex(self.store)
        self._images = ImageStore(self.store / "images")
        self._fault: dict[str, str] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.index.close()

    def _follow(self) -> None:
        """Read new tables until the server is closed. The page shows errors; reading goes on after them."""
        while not self._closing.is_set():
            try:
                self.index.refresh(self._closing.is_set)
                self._fault = {}
            except Exception as error:
                log.exception("the store could not be read")
                self._fault = {str(self.store): f"{type(error).__name__}: {error}"}
            self._closing.wait(REFRESH)

    def runs(self, request: Request) -> Any:
        """Return all runs, newest first, the revision of the index, and the files that could not be read with the
        reasons."""
        counts = self.index.counts()
        no_counts: dict[str, Any] = {"rollouts": 0, "failures": 0, "last_step": None, "heldout_steps": []}
        all_runs, problems = find_runs(self.store), self.index.problems | self._fault
        evaluations = evaluations_of(all_runs)
        runs = [
            {
                "id": run.fingerprint,
                "stage": run.stage,
                "title": run.title,
                "recipe": run.recipe,
                "steps": run.steps,
                "finished": run.finished,
                "began": run.began,
                "recorded": run.recorded,
                "evaluations": evaluations.get(run.fingerprint, {}),
                "accuracy": run.accuracy(),
                "robot": run.robot,
                **counts.get(run.fingerprint, no_counts),
                **(_episodes_of(run, problems) if run.stage == ROBOT_TRAINING else {}),
            }
            for run in all_runs
        ]
        return {"runs": runs, "revision": self.index.revision, "problems": problems}

    def history(self, request: Request) -> Any:
        """Return the metrics of a run's steps, thinned out if there are many, and the charts that show them."""
        curves = training_curves(self._run(request).history())
        return {"panels": curves.panels, "rows": curves.rows}

    def rollouts(self, request: Request) -> Any:
        return self.index.search(self._run(request).fingerprint, _query(request))

    def failures(self, request: Request) -> Any:
        run, query = self._run(request), _query(request)
        return _robot_pages().find_failures(run, query) if run.robot else self.index.failures(run.fingerprint, query)

    def tasks(self, request: Request) -> Any:
        return self.index.tasks(self._run(request).fingerprint, _query(request))

    def episodes(self, request: Request) -> Any:
        return _robot_pages().find_episodes(
            self._run(request), _question(_robot_pages().EpisodeQuery, _parameters(request))
        )

    def episode(self, request: Request) -> Any:
        return _robot_pages().episode_document(
            self._run(request), _step(request.path_params["step"]), request.path_params["episode"]
        )

    def videos(self, request: Request) -> Any:
        return {"rows": _robot_pages().find_videos(self._run(request), find_runs(self.store))}

    def video(self, request: Request) -> Response:
        return FileResponse(
            _robot_pages().video_file(self._run(request), request.path_params["path"]), media_type="video/mp4"
        )

    def page(self, request: Request) -> Response:
        """Return the run's `report.html`, which contains this viewer and the run's data, as a download.

        It is not rendered at this address, where its scripts could request everything in the store.
        """
        run = self._run(request)
        try:
            page = regular(run.artifact / "report.html")
        except OSError as error:
            raise DataError("the run has no page yet", code="run_page_missing", where=str(run.artifact)) from error
        name = f"{run.stage}-{run.fingerprint[:12]}.html"
        return FileResponse(page, media_type="text/html", filename=name)

    def changes(self, request: Request) -> Any:
        """Return the answers to a task at each step of a run, in its training, its held-out set and its evaluations."""
        run = self._run(request)
        runs = [run.fingerprint, *evaluations_of(find_runs(self.store)).get(run.fingerprint, ())]
        return {"rows": self.index.changes(runs, request.query_params.get("task", ""))}

    def compare(self, request: Request) -> Any:
        """Compare two checkpoints on the tasks that both played; `first` and `second` are RUN:SOURCE[:STEP]."""
        query = _query(request, without=("first", "second"))
        first, second = (self._side(request.query_params.get(name, "")) for name in ("first", "second"))
        return self.index.compare(first, second, query)

    def _side(self, text: str) -> Side:
        run, source, step = (*text.split(":"), "", "")[:3]
        if source not in get_args(Source):
            raise DataError(f"not rollouts to compare: {text!r}", remedy="give RUN:SOURCE or RUN:SOURCE:STEP")
        return Side(self._find(run).fingerprint, cast(Source, source), _step(step) if step else None)

    def group(self, request: Request) -> Any:
        source, step, group = (request.path_params[name] for name in ("source", "step", "group"))
        return group_document(self._run(request), source, _step(step), group)

    def image(self, request: Request) -> Response:
        name, _, suffix = request.path_params["name"].partition(".")
        media = next((media for media, ending in MEDIA.items() if ending == suffix), "")
        data = self._images.read(ImageRef(name, media, 0, 0))
        return Response(data, media_type=media, headers={"Cache-Control": "private, max-age=31536000, immutable"})

    def _run(self, request: Request) -> Run:
        return self._find(request.path_params["run"])

    def _find(self, fingerprint: str) -> Run:
        for run in find_runs(self.store, fingerprint):
            if run.fingerprint == fingerprint:
                return run
        raise DataError(f"there is no run {fingerprint!r}", where=str(self.store))


def _robot_pages() -> Any:
    return import_module(ROBOT_PAGES)


def view_app(server: ViewServer, token: str) -> Starlette:
    """Return the viewer's web application. It starts `server` when it starts, and closes it when it ends."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.start()
        yield
        await run_in_threadpool(server.close)

    run = "/api/runs/{run:str}"
    routes = [
        Route("/", lambda request: HTMLResponse(live_page())),
        Route("/assets/{name:str}", _asset),
        Route("/images/{name:str}", _answer(server.image)),
        Route("/videos/{run:str}/{path:path}", _answer(server.video)),
        Route("/api/runs", _answer(server.runs)),
        Route(f"{run}/history", _answer(server.history)),
        Route(f"{run}/rollouts", _answer(server.rollouts)),
        Route(f"{run}/failures", _answer(server.failures)),
        Route(f"{run}/tasks", _answer(server.tasks)),
        Route(f"{run}/changes", _answer(server.changes)),
        Route(f"{run}/episodes", _answer(server.episodes)),
        Route(f"{run}/episodes/{{step:str}}/{{episode:str}}", _answer(server.episode)),
        Route(f"{run}/videos", _answer(server.videos)),
        Route(f"{run}/page", _answer(server.page)),
        Route(f"{run}/groups/{{source:str}}/{{step:str}}/{{group:path}}", _answer(server.group)),
        Route("/api/compare", _answer(server.compare)),
    ]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS), Middleware(Guard, token=token)]
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan)


def _answer(ask: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that calls `ask` in a thread and answers with JSON; errors become a JSON message."""

    async def endpoint(request: Request) -> Response:
        try:
            answer = await run_in_threadpool(ask, request)
            return answer if isinstance(answer, Response) else _json(answer, 200)
        except BadQuestion as error:
            return _json({"error": str(error)}, 400)
        except DataError as error:
            return _json({"error": str(error)}, 404)
        except ArmatureError as error:
            return _json({"error": str(error)}, 500)
        except Exception as error:  # for example a document that nests too deeply, or a number outside a column's range
            log.exception("%s cannot be answered", request.url.path)
            return _json({"error": f"the data cannot be shown: {type(error).__name__}: {error!s:.500}"}, 422)

    return endpoint


def _json(value: Mapping[str, Any], status: int) -> Response:
    return Response(dump_json(value), status, media_type="application/json")


class BadQuestion(ValueError):
    """A query parameter is unknown or has an invalid value."""


def _question(model: type[ModelT], values: Mapping[str, str]) -> ModelT:
    """Return query parameters as an instance of `model`, which validates them.

    Raises:
        BadQuestion: a parameter is unknown or its value is out of bounds.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadQuestion(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _step(text: str) -> int:
    """Return the number of a step, parsed from `text`.

    Raises:
        DataError: the text is not the number of a possible step.
    """
    if not text.isdecimal() or len(text) > len(str(LAST_STEP)) or int(text) > LAST_STEP:
        raise DataError(f"there is no step {text[:80]!r}")
    return int(text)


def _query(request: Request, without: Collection[str] = ()) -> Query:
    return _question(Query, {name: value for name, value in _parameters(request).items() if name not in without})


def _episodes_of(run: Run, problems: dict[str, str]) -> dict[str, Any]:
    """Return the episode counts of a robot policy's training. If they cannot be read, add the reason to `problems` and
    return {}."""
    try:
        return _robot_pages().episode_counts(run)
    except Exception as error:
        problems[str(run.artifact)] = f"{type(error).__name__}: {error!s:.500}"
        return {}


def _parameters(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.query_params.items() if value != ""}


async def _asset(request: Request) -> Response:
    file = FILES.get(request.path_params["name"])
    return FileResponse(file) if file is not None else PlainTextResponse("not found", 404)


def serve(store: Path, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page of a store on loopback until interrupted.

    Args:
        port: port to listen on; 0: any free port.
        ready: called with the page's address, including the token, once the page can be opened.

    Raises:
        ConfigurationError: the store does not exist, or the port is in use.
    """
    if not is_folder(store):
        raise ConfigurationError(
            "the artifact store does not exist",
            code="store_missing",
            where=str(store),
            remedy="run a recipe here first, or name the store's folder: --store",
        )
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigurationError(
                f"port {port} is in use",
                code="viewer_port_in_use",
                where=listener(port),
                remedy="choose another: --port",
            ) from error
        listening.listen()
        token = secrets.token_urlsafe(24)
        app = view_app(ViewServer(store), token)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under nohup, the signal stays ignored
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGINT))
        with announced(store, address):
            ready(f"{address}?token={token}")
            server.run(sockets=[listening])
