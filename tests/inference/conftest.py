"""Stand-in servers and checkpoint folders for the tests of the pool."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from armature.components.inference import determinism
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings, ServerSettings
from tests.builders import make_machine

KEY = "a-key"


@pytest.fixture(autouse=True)
def _requests_arrive_at_once(monkeypatch) -> None:
    """Shorten the wait of the determinism check for its requests to arrive: a stand-in server computes nothing."""
    monkeypatch.setattr(determinism, "_ARRIVAL", 0.05)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


stand_in = _load("stand_in")


def make_sampling(**changes: Any) -> SamplingSettings:
    return SamplingSettings.model_validate({"max_tokens": 3} | changes)


SAMPLING = make_sampling()
MESSAGES = [{"role": "user", "content": "?"}]


async def ask_many(pool: ServerPool, count: int = 4) -> list[Any]:
    """Send `count` requests to a pool, and return an answer or an error for each.

    Their seeds are not consecutive, so that the pool does not merge the requests.
    """
    jobs = (pool.complete(MESSAGES, SAMPLING, 2 * seed) for seed in range(count))
    return await asyncio.gather(*jobs, return_exceptions=True)


def texts(results: list[Any]) -> set[tuple[str, int]]:
    """Return the weights that computed the answers `results`, as pairs: the name of the weights, which a stand-in
    answers as its text, and the policy version that the pool gave them."""
    return {(result.text, result.policy_version) for result in results}


def write_checkpoint(folder: Path, width: int = 4, dtype: str = "F32") -> Path:
    """Write a folder that looks like a checkpoint, with one tensor (2, width) of zeros. No real model can load it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"image_token_id": 7, "video_token_id": 8}))
    size = 2 * width * {"F32": 4, "BF16": 2}[dtype]
    header = json.dumps({"w": {"dtype": dtype, "shape": [2, width], "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    return folder


@pytest.fixture
def sampling() -> SamplingSettings:
    return SAMPLING


@pytest.fixture
def checkpoint(tmp_path) -> Callable[..., Path]:
    return lambda name, **kwargs: write_checkpoint(tmp_path / name, **kwargs)


@pytest.fixture
def stand_ins(monkeypatch) -> Iterator[Callable[..., list[Any]]]:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with ExitStack() as stack:
        yield lambda count, plain=False: [
            stack.enter_context(stand_in.run_stand_in(KEY, plain=plain)) for _ in range(count)
        ]


@pytest.fixture
def make_pool(tmp_path) -> Callable[..., ServerPool]:
    def make(
        servers: list[Any],
        weights: Path,
        *,
        in_flight_updates: bool = False,
        quantization: str | None = None,
        **machine: Any,
    ) -> ServerPool:
        limits: dict[str, Any] = {"generation_timeout": 3.0, "ready_timeout": 10.0, "sync_timeout": 5.0}
        return ServerPool(
            weights,
            ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32", quantization=quantization),
            make_machine(endpoints=tuple(server.url for server in servers), **(limits | machine)),
            tmp_path / "logs",
            in_flight_updates=in_flight_updates,
        )

    return make


@pytest.fixture
def join(stand_ins, make_pool, checkpoint) -> Callable[..., tuple[list[Any], ServerPool]]:
    """Return a function that starts `count` stand-in servers, and makes a pool that joins them with a checkpoint
    called "a". It returns the servers and the pool."""

    def make(count: int, plain: bool = False, **changes: Any) -> tuple[list[Any], ServerPool]:
        servers = stand_ins(count, plain)
        return servers, make_pool(servers, checkpoint("a"), **changes)

    return make
