"""Requests per second through the pool and straight to the same server, over aiohttp and over httpx, in turn."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.rollouts import FAMILY
from benchmarks.table import Row, pair

REQUESTS, CONCURRENT, TOKENS, ROUNDS = 256, 128, 16, 6
Send = Callable[[Any], Awaitable[object]]


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        ours, bare, httpx_ = asyncio.run(_measure(Path(scratch)))
    note = f"{REQUESTS} requests of one image and {TOKENS} tokens, {CONCURRENT} at once, one server"
    rows = []
    for name, rates in (("bare server, aiohttp", bare), ("bare server, httpx", httpx_)):
        both = pair(ours, rates)
        what = "requests answered, with every check"
        rows.append(Row(what, both.ours, both.baseline, name, "requests/s", "higher", note, both.spread))
    return rows


async def _measure(scratch: Path) -> list[list[float]]:
    """Return the request rates of each round: through the pool, with aiohttp, and with httpx."""
    from armature.components.contracts.machine import Machine, MachineLimits
    from armature.components.inference.client import open_session, request_body
    from armature.components.inference.pool import ServerPool
    from armature.components.inference.settings import SamplingSettings, ServerSettings
    from armature.components.models.tiny import make_tiny_checkpoint

    checkpoint = make_tiny_checkpoint(FAMILY, scratch / "model", 0)
    sampling = SamplingSettings(max_tokens=TOKENS)
    settings = ServerSettings(max_model_len=512, max_images_per_prompt=1, dtype="float32")
    machine = Machine(limits=MachineLimits(max_concurrent=CONCURRENT))
    messages = [_message(index) for index in range(REQUESTS)]
    seeds = itertools.count()

    async with (
        ServerPool(checkpoint, settings, machine, log_folder=scratch / "logs") as pool,
        open_session() as session,
        httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=CONCURRENT), trust_env=False
        ) as client,
    ):
        endpoint = pool.replicas[0].endpoint
        url = f"{endpoint.url}/v1/chat/completions"
        slots = asyncio.Semaphore(CONCURRENT)

        def body(message: Any) -> dict[str, Any]:
            return request_body(message, sampling, next(seeds), 1, pool.forbidden_token_ids)

        async def through_pool(message: Any) -> None:
            await pool.complete(message, sampling, next(seeds))

        async def over_aiohttp(message: Any) -> None:
            async with slots, session.post(url, json=body(message), headers=endpoint.headers) as answer:
                answer.raise_for_status()
                await answer.json()

        async def over_httpx(message: Any) -> None:
            async with slots:
                answer = await client.post(url, json=body(message), headers=endpoint.headers, timeout=600)
                answer.raise_for_status()
                answer.json()

        sides: list[Send] = [through_pool, over_aiohttp, over_httpx]
        await _rate(over_aiohttp, messages)  # every image is in the server's cache from here on
        rates: list[list[float]] = [[] for _ in sides]
        for round_ in range(ROUNDS):
            for index in (0, 1, 2) if round_ % 2 else (2, 1, 0):
                rates[index].append(await _rate(sides[index], messages))
    return rates


async def _rate(send: Send, messages: Sequence[Any]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(send(message) for message in messages))
    return len(messages) / (time.perf_counter() - began)


def _message(index: int) -> list[dict[str, Any]]:
    from base64 import b64encode

    from PIL import Image

    from armature.components.artifacts.images import encode_png

    image = encode_png(Image.new("RGB", (56, 56), (index * 3 % 255, index * 7 % 255, 80)))
    url = f"data:{image.media_type};base64,{b64encode(image.data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What colour is this?"}]
    return [{"role": "user", "content": content}]
