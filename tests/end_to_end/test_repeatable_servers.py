"""A request has the same bits whatever else real servers compute, and whatever they have cached."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from armature.components.inference import determinism
from armature.components.inference.client import Completion
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings, ServerSettings
from tests.builders import make_machine
from tests.images import image_part, noise

ROOT = Path(__file__).parents[2]
PYTHON, SERVED = ROOT / ".venv-vllm/bin/python", ROOT / "components/inference/served"
SETTINGS = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")
REQUESTS = 24


class Asked:
    """Sends the same requests to a pool in different ways: together, one by one, or among other requests.

    The requests have different lengths and zero to two images. The methods return the answers by request.
    """

    def __init__(self, pool: ServerPool, portal: BlockingPortal, sampling: SamplingSettings) -> None:
        self.pool, self.portal, self.sampling = pool, portal, sampling
        choose, images = Random(0), [image(seed) for seed in range(8)]
        words = ("go", "to", "the", "desk", "what", "color", "is", "it")
        self.messages = []
        for _ in range(REQUESTS):
            text = " ".join(choose.choices(words, k=choose.randint(2, 40)))
            content = [*choose.choices(images, k=choose.randint(0, 2)), {"type": "text", "text": text}]
            self.messages.append([{"role": "user", "content": content}])
        self.messages[1] = self.messages[0]  # with a seed that follows: one request for both

    def together(self, order: list[int]) -> dict[int, Completion]:
        async def ask() -> list[Completion]:
            return list(await asyncio.gather(*(self._complete(index) for index in order)))

        return dict(zip(order, self.portal.call(ask), strict=True))

    def one_by_one(self, order: list[int]) -> dict[int, Completion]:
        async def ask() -> list[Completion]:
            return [await self._complete(index) for index in order]

        return dict(zip(order, self.portal.call(ask), strict=True))

    def among_others(self, order: list[int], delays: Random) -> dict[int, Completion]:
        """Send each request at a random time, while other requests are sent and answered. Return the answers by
        request."""

        async def late(index: int, delay: float, seed: int) -> Completion:
            await asyncio.sleep(delay)
            return await self.pool.complete(self.messages[index], self.sampling, seed)

        async def ask() -> list[Completion]:
            others = [late(delays.choice(order), delays.random() * 2, 1000 + other) for other in range(3 * REQUESTS)]
            wanted = [late(index, delays.random() * 2, index) for index in order]
            return (await asyncio.gather(*wanted, *others))[: len(order)]

        return dict(zip(order, self.portal.call(ask), strict=True))

    async def _complete(self, index: int) -> Completion:
        return await self.pool.complete(self.messages[index], self.sampling, index)


def image(seed: int) -> dict[str, Any]:
    """Return an image of random pixels as a part of a chat message. The images of even seeds are as low as possible:
    a matrix product with few rows is rounded differently if their number changes."""
    return image_part(noise(seed, width=28 * (1 + seed % 4), height=28 * (1 + seed % 2)))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    if not PYTHON.exists():
        pytest.skip("needs .venv-vllm: make environments")
    from armature.components.models.tiny import SMALL, make_tiny_checkpoint

    folder, size = tmp_path_factory.mktemp("model") / "0", SMALL.model_copy(update={"image_side": 28})
    return make_tiny_checkpoint("molmo2", folder, 0, size, image_attention="causal")


@pytest.fixture
def asked(model, tmp_path) -> Iterator[Asked]:
    machine = make_machine(servers__python=PYTHON, servers__count=2, threads=2, ready_timeout=600)
    pool = ServerPool(model, SETTINGS, machine, tmp_path / "logs")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(pool):
        yield Asked(pool, portal, SamplingSettings(max_tokens=24))


@pytest.mark.slow
def test_logprobs_do_not_depend_on_the_batch_or_server(asked):
    order, random = list(range(REQUESTS)), Random(1)
    first = asked.together(order)
    answers = [asked.one_by_one(order), asked.together(order[::-1])]
    random.shuffle(order)
    answers += [asked.one_by_one(order), asked.among_others(order, random), asked.among_others(order, random)]
    for again in (asked.together, asked.together, asked.one_by_one):
        asked.portal.call(asked.pool.reset_caches)  # or images and prefixes are those of the first time
        answers.append(again(order))
    servers = {index: {first[index].server} for index in order}
    for result in answers:
        for index in order:
            servers[index].add(result[index].server)
            assert result[index].token_ids.tobytes() == first[index].token_ids.tobytes()
            assert result[index].logprobs.tobytes() == first[index].logprobs.tobytes()
    assert sum(len(names) == 2 for names in servers.values()) > REQUESTS // 3


ENCODES = """
import dataclasses, json
from armature_served import register
register()
register()
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

batches = []

class Runner(GPUModelRunner):
    def __init__(self):
        pass

    def _batch_mm_inputs_from_scheduler(self, scheduler_output):
        batches.append(scheduler_output.scheduled_encoder_inputs)
        return [], [], []

step = dataclasses.replace(SchedulerOutput.make_empty(), scheduled_encoder_inputs={"a": [0, 1], "b": [2]})
Runner()._execute_mm_encoder(step)
print("batches", json.dumps(batches))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "batches"), [("0", [{"a": [0]}, {"a": [1]}, {"b": [2]}]), ("1", [{"a": [0, 1], "b": [2]}])]
)
def test_deterministic_servers_encode_images_one_by_one(split, batches):
    if not PYTHON.exists():
        pytest.skip("needs .venv-vllm: make environments")
    environment = {**os.environ, "PYTHONPATH": str(SERVED), "VLLM_CPU_ATTN_SPLIT_KV": split}
    ended = subprocess.run([PYTHON, "-c", ENCODES], env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.rpartition("batches ")[2]) == batches


@pytest.mark.slow
async def test_preflight_finds_a_batch_dependent_server(model, tmp_path, caplog):
    machine = make_machine(
        servers__python=PYTHON, threads=2, ready_timeout=600, servers__environment={"VLLM_CPU_ATTN_SPLIT_KV": "1"}
    )
    pool = ServerPool(model, SETTINGS, machine, tmp_path / "logs")
    async with pool:
        pass
    assert not pool.repeatability.promised
    assert [record.name for record in caplog.records if "vllm-0" in record.message] == [determinism.__name__]
