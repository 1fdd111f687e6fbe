"""Tokens per second of a server whose answers do not depend on what else it computes, and of one whose may."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.rollouts import FAMILY
from benchmarks.table import Row, pair

THREADS, ROUNDS, TOKENS, WORDS = 2, 6, 64, 90
AT_ONCE = {1: 8, 8: 32, 64: 128}
"""Number of requests sent in a round, by the number of requests in flight."""


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        rates = asyncio.run(_measure(Path(scratch)))
    rows = []
    for at_once, (deterministic, default) in rates.items():
        both = pair(deterministic, default)
        note = f"{TOKENS} sampled tokens a request, {at_once} at once, one server, {THREADS} threads"
        rows.append(
            Row(
                "tokens of a deterministic server",
                both.ours,
                both.baseline,
                "vLLM's default",
                "tokens/s",
                "higher",
                note,
                both.spread,
            )
        )
    return rows


async def _measure(scratch: Path) -> dict[int, tuple[list[float], list[float]]]:
    from armature.components.contracts.machine import Machine
    from armature.components.inference.pool import ServerPool
    from armature.components.inference.settings import SamplingSettings, ServerSettings
    from armature.components.models.tiny import make_tiny_checkpoint

    checkpoint = make_tiny_checkpoint(FAMILY, scratch / "model", 0)
    sampling = SamplingSettings(max_tokens=TOKENS)
    seeds = itertools.count()
    taken: dict[int, tuple[list[float], list[float]]] = {at_once: ([], []) for at_once in AT_ONCE}
    async with AsyncExitStack() as stack:
        pools = []
        for deterministic in (True, False):
            settings = ServerSettings(
                max_model_len=1024, max_images_per_prompt=0, dtype="float32", deterministic=deterministic
            )
            pool = ServerPool(checkpoint, settings, Machine(threads=THREADS), log_folder=scratch / str(deterministic))
            pools.append(await stack.enter_async_context(pool))

        async def rate(pool: ServerPool, at_once: int) -> float:
            slots = asyncio.Semaphore(at_once)

            async def one(seed: int) -> int:
                async with slots:
                    return len((await pool.complete(_message(seed), sampling, seed)).token_ids)

            began = time.perf_counter()
            sampled = await asyncio.gather(*(one(next(seeds)) for _ in range(AT_ONCE[at_once])))
            return sum(sampled) / (time.perf_counter() - began)

        for pool in pools:
            await rate(pool, max(AT_ONCE))
        for at_once, (ours, default) in taken.items():
            for round_ in range(ROUNDS):
                for side in (0, 1) if round_ % 2 else (1, 0):
                    (ours, default)[side].append(await rate(pools[side], at_once))
    return taken


def _message(seed: int) -> list[dict[str, Any]]:
    words = itertools.islice(itertools.cycle(("go", "to", "the", f"desk {seed}")), WORDS)
    return [{"role": "user", "content": [{"type": "text", "text": " ".join(words)}]}]
