"""A trainer on one GPU sends weights by NCCL to a vLLM server on another, which is restarted between versions."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import LogProbs
from armature.components.inference.pool import ServerPool
from armature.components.inference.probe import GPU_FLOAT32, ask_probe, distance
from armature.components.inference.replies import Endpoint
from armature.components.inference.server import VllmServer
from armature.components.inference.settings import SamplingSettings, ServerSettings
from armature.components.rollouts.batches.table import write_batch
from armature.components.vlm.client import TrainerClient
from tests.builders import make_machine
from tests.vlm.conftest import Tiny

KEY = "a-key"
SERVED = Path(__file__).parents[2] / "components/inference/served"
SETTINGS = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")
VERSIONS = 3

pytestmark = [pytest.mark.gpu(2), pytest.mark.slow, pytest.mark.timeout(400)]


def server_machine(port: int | None = None) -> Machine:
    """Return settings of a machine with a server that the test starts itself and the pool joins."""
    paths = os.pathsep.join([str(SERVED), os.environ.get("PYTHONPATH", "")])
    return make_machine(
        servers__python=Path(os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python")),
        servers__gpus=((1,),),
        weight_transfer="nccl",
        servers__arguments={"gpu_memory_utilization": 0.2, "enforce_eager": True} | ({"port": port} if port else {}),
        servers__environment={"PYTHONPATH": paths},
        ready_timeout=200,
    )


def trainer_machine() -> Machine:
    return make_machine(
        trainer__gpus=(0,), weight_transfer="nccl", loader_workers=0, ready_timeout=120, sync_timeout=60
    )


def used_memory() -> str:
    """Return a text with the used memory of each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    return ", ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


class Run:
    """A trainer with one batch for each version of the weights, and a server pool that has joined one server."""

    def __init__(self, tiny: Tiny, folder: Path) -> None:
        self.folder = folder
        self.batches = [folder / f"batch-{version}" for version in range(1, VERSIONS + 1)]
        for version, batch in enumerate(self.batches, 1):
            batch.mkdir()
            write_batch(batch, tiny.samples(8, seed=version))
        self._policy = tiny.policy(learning_rate=0.01)
        self.model, self.version, self._before = tiny.folder, 0, list[LogProbs]()

    @asynccontextmanager
    async def opened(self, url: str) -> AsyncIterator[ServerPool]:
        machine = make_machine(
            endpoints=(url,), weight_transfer="nccl", ready_timeout=60, sync_timeout=60, lease_timeout=60
        )
        async with AsyncExitStack() as stack:
            self.trainer = stack.enter_context(TrainerClient(self._policy, trainer_machine(), self.folder / "trainer"))
            self.pool = await stack.enter_async_context(ServerPool(self.model, SETTINGS, machine, self.folder / "logs"))
            yield self.pool

    async def sync(self) -> None:
        """Train a step, send its weights, and check by a probe that the server has exactly these weights."""
        self.version = version = self.version + 1
        await asyncio.to_thread(self.trainer.step, version, self.batches[version - 1])
        answer = await asyncio.to_thread(self.trainer.probe, self.pool.weights.probe, version)

        async def send(endpoints: Sequence[Endpoint]) -> None:
            began = time.monotonic()
            await asyncio.to_thread(self.trainer.send, endpoints, version)
            print(f"version {version}: sent in {time.monotonic() - began:.2f} s", end="")

        await self.pool.sync(self.folder / "unread", version, send, answer)
        await until(lambda: self.pool.replicas[0].ready)
        reply = await ask_probe(self.pool.http, self.pool.replicas[0].endpoint, self.pool.weights.probe)
        off, moved = distance(reply, answer.logprobs), [distance(reply, before) for before in self._before]
        print(
            f"; {off:.1e} nats off, from versions before {', '.join(f'{each:.1e}' for each in moved)}; {used_memory()}"
        )
        assert off < GPU_FLOAT32 and all(each > 2 * GPU_FLOAT32 for each in moved)
        self._before.append(answer.logprobs)
        sampled = await self.pool.complete([{"role": "user", "content": "?"}], SamplingSettings(max_tokens=3), version)
        assert (sampled.policy_version, sampled.server) == (version, self.pool.replicas[0].name)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


async def started(stack: AsyncExitStack, model: Path, folder: Path, port: int | None = None) -> VllmServer:
    server = VllmServer(SETTINGS, server_machine(port), index=0, log_folder=folder, api_key=KEY)
    stack.push_async_callback(server.stop)
    began = time.monotonic()
    await server.start(model)
    print(f"{server.url} is up after {time.monotonic() - began:.0f} s")
    return server


@pytest.fixture
def run(make_tiny, tmp_path, monkeypatch) -> Run:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    return Run(make_tiny("qwen3-vl"), tmp_path)


def test_nccl_group_is_renewed_for_same_server(run):
    async def work(model: Path) -> None:
        async with AsyncExitStack() as stack:
            one = await started(stack, model, run.folder / "one")
            async with run.opened(one.url) as pool:
                await run.sync()
                await run.sync()  # uses the same group
                pool.replicas[0].joined += 1  # pretend that it may be another process
                await run.sync()

    asyncio.run(work(run.model))


def test_nccl_group_is_renewed_for_restarted_server(run):
    """The server is restarted at the same address, and no request notices that in the meantime."""

    async def work(model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        async with AsyncExitStack() as stack:
            server = await started(stack, model, run.folder / "server", port)
            url = server.url
            async with run.opened(url) as pool:
                await run.sync()
                await server.stop()
                await server.start(model)
                assert server.url == url and pool.replicas[0].joined == 1
                await run.sync()
                assert pool.replicas[0].joined == 2

    asyncio.run(work(run.model))
