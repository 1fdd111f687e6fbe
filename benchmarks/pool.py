"""Requests per second through the pool and straight to the same server, the same requests in turn."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.rollouts import FAMILY
from benchmarks.table import Pair, Row, pair

REQUESTS, CONCURRENT, TOKENS, ROUNDS = 64, 32, 16, 6


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        both = asyncio.run(_measure(Path(scratch)))
    note = f"{REQUESTS} requests of one image and {TOKENS} tokens, {CONCURRENT} at once, one server"
    what = "requests answered, with every check"
    return [Row(what, both.ours, both.baseline, "bare server", "requests/s", "higher", note, both.spread)]


async def _measure(scratch: Path) -> Pair:
    import time

    from components.contracts.machine import Machine
    from components.inference.client import open_session, request_body
    from components.inference.pool import ServerPool
    from components.inference.settings import SamplingSettings, ServerSettings
    from components.models.tiny import make_tiny_checkpoint

    checkpoint = make_tiny_checkpoint(FAMILY, scratch / "model", 0)
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    sampling = SamplingSettings(temperature=1.0, max_tokens=TOKENS, **neutral, **penalties)
    settings = ServerSettings(max_model_len=512, max_images_per_prompt=1, dtype="float32")
    machine = Machine(max_concurrent=CONCURRENT)
    messages = [_message(index) for index in range(REQUESTS)]
    seeds = itertools.count()

    async with ServerPool(checkpoint, settings, machine, log_folder=scratch / "logs") as pool:
        endpoint = pool.replicas[0].endpoint
        slots = asyncio.Semaphore(CONCURRENT)

        async def through_pool(message: Any) -> None:
            await pool.complete(message, sampling, next(seeds))

        async def straight(session: aiohttp.ClientSession, message: Any) -> None:
            body = request_body(message, sampling, next(seeds), 1, pool.forbidden_token_ids)
            async with slots:
                url = f"{endpoint.url}/v1/chat/completions"
                async with session.post(url, json=body, headers=endpoint.headers) as answer:
                    answer.raise_for_status()
                    await answer.json()

        async with open_session() as session:

            async def rate(side: Any) -> float:
                began = time.perf_counter()
                await asyncio.gather(*(side(message) for message in messages))
                return REQUESTS / (time.perf_counter() - began)

            def bare(message: Any) -> Any:
                return straight(session, message)

            await rate(bare)  # every image is in the server's cache from here on
            taken: dict[Any, list[float]] = {through_pool: [], bare: []}
            for round_ in range(ROUNDS):
                for side in (through_pool, bare) if round_ % 2 else (bare, through_pool):
                    taken[side].append(await rate(side))
    return pair(taken[through_pool], taken[bare])


def _message(index: int) -> list[dict[str, Any]]:
    from base64 import b64encode

    from PIL import Image

    from components.artifacts.images import encode_png

    picture = encode_png(Image.new("RGB", (56, 56), (index * 3 % 255, index * 7 % 255, 80)))
    url = f"data:{picture.media_type};base64,{b64encode(picture.data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What colour is this?"}]
    return [{"role": "user", "content": content}]
