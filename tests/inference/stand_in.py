"""A stand-in for vLLM at the outermost edge: a real HTTP server that speaks its protocol and misbehaves on demand.

It answers like a server with a vocabulary of ten tokens whose log-probs name the weights that it holds, so that
a test sees which weights answered. Faults are set for the next so many requests, or for ever.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).parents[2] / "components/inference/served"))
from armature_served.require_key import RequireKey

PROMPT = [1, 7, 7, 7, 2]


@dataclass
class StandIn:
    """One stand-in server: its settings, its faults and what it has counted. `url` is set once it runs."""

    key: str
    url: str = ""
    root: str = "somewhere"
    vllm: str = "0.32.0"
    version: str = "start"
    fault: str = ""
    fault_count: int = 0
    """Number of further requests that get the fault; -1: all requests."""
    delay: float = 0.0
    tokens: tuple[int, int, int] = (3, 4, 5)
    """Token ids of every completion."""
    depends_on: str = ""
    """Name of the cause that changes a log-prob in the determinism check: "others", "images", "reload" or "server". ""
    means that log-probs never change."""
    healthy: bool = True
    list_of_models: str = ""
    """If not empty, the body that the route /v1/models returns in place of the list of models."""
    answered: Counter[int] = field(default_factory=Counter)
    """Seeds of the chat requests that got a complete answer."""
    seen: int = 0
    most_at_once: int = 0
    at_once: int = 0
    rewrite: Callable[[dict[str, Any]], Any] | None = None
    """A function that turns the correct answer to a chat request into the one that is sent, as JSON or as a complete
    response."""
    plain: bool = False
    """True if the server runs without our plug-in: it has no lease, and its answers have no id of the weights."""
    paused: bool = False
    loading: asyncio.Event | None = None
    """If not None, the server waits for this event of its event loop before it loads weights."""
    adapters: dict[str, str] | None = field(default_factory=dict)
    """Adapter folders by name. None means that the server does not support adapters."""
    calls: list[str] = field(default_factory=list)
    checked: Counter[bool] = field(default_factory=Counter)
    """Number of requests of a determinism check that the server is answering: with an image (True) and without
    (False)."""
    most_checked: Counter[bool] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def misbehave(self, fault: str, count: int = -1) -> None:
        self.fault, self.fault_count = fault, count

    def _next_fault(self) -> str:
        if self.fault_count == 0:
            return ""
        self.fault_count -= self.fault_count > 0
        return self.fault

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        if "top_logprobs" in body:
            top = [{"logprob": self._probed() - place} for place in range(body["top_logprobs"])]
            return JSONResponse({"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]})
        if "ignore_eos" in body:
            content = [{"logprob": await self._bits(True)} for _ in range(body["max_completion_tokens"])]
            return JSONResponse({"choices": [{"logprobs": {"content": content}}]})
        if body["model"] not in ("policy", *(self.adapters or {})):
            return JSONResponse({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
        self.bodies.append(body)
        self.seen += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            fault = self._next_fault()
            await asyncio.sleep(self.delay)
            while self.paused:
                await asyncio.sleep(0.01)
            if fault == "hang":
                await asyncio.sleep(60)
            if fault == "500":
                return JSONResponse({"error": {"message": "EngineCore encountered an issue"}}, 500)
            if fault == "400":
                return JSONResponse({"error": {"message": "maximum context length is 512 tokens"}}, 400)
            if fault == "not json":
                return Response("<html>", 200)
            if fault == "die":
                return _Broken()
            answer: Any = self._answer(body)
            self.answered[body["seed"]] += 1
            if self.rewrite is not None:
                answer = self.rewrite(answer)
            if isinstance(answer, Response):
                return answer
            # json.dumps and not JSONResponse: NaN has to get through.
            return Response(json.dumps(answer), media_type="application/json")
        finally:
            self.at_once -= 1

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        logprobs = [-0.5, -1.0, -float(self.version == "start")]
        choices = [
            {
                "index": index,
                "message": {"content": f"{self.version}"},
                "token_ids": list(self.tokens),
                "logprobs": {"content": [{"logprob": value} for value in logprobs]},
                "finish_reason": "stop",
            }
            for index in range(body["n"])
        ]
        return {"prompt_token_ids": PROMPT, "choices": choices[::-1]}

    async def control(self, request: Request) -> Response:
        self.calls.append(request.url.path)
        fault = self._next_fault() if self.fault.startswith("sync") else ""
        if fault in GARBAGE:
            return GARBAGE[fault]()
        if request.url.path in ("/pause", "/resume"):
            self.paused = request.url.path == "/pause"
            assert not self.paused or request.query_params["mode"] == "keep"
        if request.url.path == "/reset_prefix_cache":
            return JSONResponse({"success": fault != "sync cache busy"})
        if request.url.path == "/collective_rpc":
            body = await request.json()
            assert body["method"] == "reload_weights"
            if fault == "sync refuse":
                return JSONResponse({"error": "shape mismatch"}, 500)
            self.loop = asyncio.get_running_loop()
            if self.loading is not None:
                await self.loading.wait()
            if fault == "sync hang":
                await asyncio.sleep(60)
            if fault == "sync die":
                return _Broken()
            if fault != "sync nothing":
                self.version = Path(body["kwargs"]["weights_path"]).name
            return JSONResponse({"results": [None]})
        return JSONResponse({})

    async def adapter(self, request: Request) -> Response:
        self.calls.append(request.url.path)
        body = await request.json()
        name = body["lora_name"]
        if self.adapters is None:
            return Response(status_code=404)
        if request.url.path.endswith("unload_lora_adapter"):
            del self.adapters[name]
            self.version = self.root
        elif name in self.adapters:
            return JSONResponse({"error": {"message": "it has already been loaded"}}, 400)
        else:
            self.adapters[name] = body["lora_path"]
            self.version = Path(body["lora_path"]).name
        return Response("Success")

    async def completions(self, request: Request) -> Response:
        if self.fault == "sync no probe":
            return JSONResponse({"choices": [{}]})
        body = await request.json()
        tokens = body["prompt"]
        if "ignore_eos" in body:
            logprobs = {"token_logprobs": [await self._bits(False)] * body["max_tokens"]}
            return JSONResponse({"choices": [{"logprobs": logprobs}]})
        entries = [None, *({str(token): {"logprob": self._probed()}} for token in tokens[1:])]
        return JSONResponse({"choices": [{"prompt_logprobs": entries}]})

    async def _bits(self, image: bool) -> float:
        """Return the log-prob of a sampled token in a determinism check. It changes by 1e-7 if the cause `depends_on`
        is present."""
        self.checked[image] += 1
        self.most_checked |= self.checked
        in_one_step = self.paused
        try:
            while self.paused:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.001)
            others = self.checked.total() > 1
        finally:
            self.checked[image] -= 1
        moved = {
            "others": others,
            "images": image and in_one_step,
            "reload": self.calls.count("/collective_rpc") > 1,
            "server": True,
        }
        return -0.5 - 1e-7 * moved.get(self.depends_on, False)

    def _probed(self) -> float:
        return -float(sum(self.version.encode()) % 97)

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def says_version(self, _: Request) -> Response:
        return JSONResponse({"version": self.vllm})

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return Response(status_code=401)
        if self.list_of_models:
            return Response(self.list_of_models)
        names = ["policy", *(self.adapters or {})]
        return JSONResponse({"data": [{"id": name, "root": self.root} for name in names]})

    def start_again(self) -> None:
        """Reset the state as if the server had been killed and restarted by its owner."""
        self.version, self.paused = "start", False
        if self.adapters is not None:
            self.adapters = {}
        with mock.patch.dict(os.environ, {"VLLM_API_KEY": self.key}):
            self._asgi: Any = self._app() if self.plain else RequireKey(self._app())

    @property
    def lease(self) -> Any:
        """The plug-in's middleware `Lease`, with its state."""
        return self._asgi.app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._asgi(scope, receive, send)

    def _app(self) -> Starlette:
        post = ["POST"]
        controls = ["/collective_rpc", "/pause", "/resume"]
        controls += ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"]
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/version", self.says_version),
                Route("/v1/chat/completions", self.chat, methods=post),
                Route("/v1/completions", self.completions, methods=post),
                Route("/v1/load_lora_adapter", self.adapter, methods=post),
                Route("/v1/unload_lora_adapter", self.adapter, methods=post),
                *(Route(path, self.control, methods=post) for path in controls),
            ]
        )


async def _endless() -> Any:
    for _ in range(3000):
        yield b" " * 2**16
        await asyncio.sleep(0)


GARBAGE: dict[str, Callable[[], Response]] = {
    "sync html": lambda: Response("<html>"),
    "sync list": lambda: JSONResponse([]),
    "sync empty": lambda: JSONResponse({}),
    "sync null": lambda: JSONResponse({"results": None, "success": None}),
    "sync nested": lambda: Response("[" * 50_000),
    "sync endless": lambda: StreamingResponse(_endless()),
}


class _Broken(Response):
    """A response that ends the connection in the middle of the body, as if the server had been killed."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})
        raise ConnectionResetError


@contextlib.contextmanager
def run_stand_in(key: str, port: int = 0, plain: bool = False) -> Iterator[StandIn]:
    """Run a stand-in server in a thread, on `port` of loopback (0: any free port), while the block runs."""
    stand_in = StandIn(key, plain=plain)
    stand_in.start_again()
    config = uvicorn.Config(stand_in, host="127.0.0.1", port=port, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    stand_in.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield stand_in
    finally:
        server.should_exit = server.force_exit = True
        thread.join(5)


def main() -> None:
    """Run a stand-in server as a program, in place of vLLM's. It reads the arguments host, port and model, and the
    variable VLLM_API_KEY.

    It exits with an error as long as there is a file called "refuse" beside the checkpoint.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--model", type=Path)
    arguments, _ = parser.parse_known_args()
    if (arguments.model.parent / "refuse").exists():
        sys.exit("it does not want to")
    stand_in = StandIn(os.environ["VLLM_API_KEY"], root=str(arguments.model), version=arguments.model.name, delay=0.3)
    stand_in.start_again()
    stand_in.version = arguments.model.name
    uvicorn.run(stand_in, host=arguments.host, port=arguments.port, log_level="critical")


if __name__ == "__main__":
    main()
