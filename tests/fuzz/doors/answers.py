"""Replies of a model server: the pool's client calls a real HTTP server that sends damaged replies."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal
from starlette.responses import Response

from armature.components.inference.client import Completion
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import ServerSettings
from tests.builders import make_machine
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, damaged_document, dumps
from tests.inference.conftest import make_sampling, stand_in, write_checkpoint

MESSAGES = [{"role": "user", "content": "which?"}]
JSON = "application/json"


def read(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def damaged(answer: dict[str, Any], rng: random.Random) -> tuple[Response, Any]:
    """Return a response with a damaged answer, and the document in it; None if the response has no valid JSON."""
    document = damaged_document(answer, rng)
    text = dumps(document)
    kind = rng.random()
    if kind < 0.7:
        return Response(text, media_type=JSON), document
    if kind < 0.8:
        raw = damaged_bytes(text, rng)
        return Response(raw, media_type=JSON), read(raw)
    if kind < 0.85:
        return Response(gzip.compress(bytes(10**8), 1), media_type=JSON, headers={"content-encoding": "gzip"}), None
    if kind < 0.9:
        return Response(text, media_type=JSON, headers={"content-encoding": rng.choice(("gzip", "br", "?"))}), document
    return Response(text, rng.choice((201, 204, 301, 307, 400, 418, 429, 500, 503)), media_type=JSON), None


def check(completions: list[Any], document: Any, n: int) -> bool:
    whole = [each for each in completions if isinstance(each, Completion)]
    expect(len(completions) == n, f"{len(completions)} results of {n}")
    if not whole:
        return False
    expect(isinstance(document, dict), "samples of an answer that is no JSON object")
    choices = {choice["index"]: choice for choice in document["choices"]}
    for index, completion in enumerate(completions):
        if isinstance(completion, Completion):
            ids, choice = completion.token_ids.tolist(), choices[index]
            expect(ids == choice["token_ids"] and all(type(each) is int for each in choice["token_ids"]), "other ids")
            expect(completion.prompt_token_ids.tolist() == document["prompt_token_ids"], "another prompt")
            values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            near = all(abs(a - b) < 1e-3 for a, b in zip(completion.logprobs.tolist(), values, strict=True))
            expect(near, "other log-probs")
            expect(completion.text == (choice["message"]["content"] or ""), "another text")
            completion.text.encode()
    return True


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    os.environ["VLLM_API_KEY"] = "a-key"
    weights, sampling = write_checkpoint(folder / "weights"), make_sampling()
    with stand_in.run_stand_in("a-key") as server, start_blocking_portal() as portal:
        limits: dict[str, Any] = {"generation_timeout": 5.0, "ready_timeout": 10.0, "sync_timeout": 10.0}
        pool = ServerPool(
            weights,
            ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32"),
            make_machine(endpoints=(server.url,), **limits),
            folder / "logs",
        )

        async def ask(n: int) -> list[Any]:
            return list(await pool.sample(MESSAGES, sampling, 0, n))

        def attempt(rng: random.Random) -> bool:
            sent: list[Any] = []

            def rewrite(answer: dict[str, Any]) -> Response:
                response, document = damaged(answer, rng)
                sent.append(document)
                return response

            n = rng.randint(1, 3)
            server.rewrite = rewrite
            try:
                return check(portal.call(ask, n), sent[-1], n)
            finally:
                server.rewrite = None
                after = portal.call(ask, 1)
                expect(isinstance(after[0], Completion), f"the pool no longer works: {after[0]!r}")

        with portal.wrap_async_context_manager(pool):
            yield attempt
