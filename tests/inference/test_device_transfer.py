"""Weights from the trainer's GPUs to a real vLLM server. Needs CUDA and vLLM >= 0.26 for it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from armature.components.contracts.machine import Machine
from armature.components.inference.pool import ServerPool
from armature.components.inference.probe import ProbeAnswer, ask_probe, distance
from armature.components.inference.replies import Endpoint
from armature.components.inference.settings import ServerSettings
from armature.components.inference.weights import WEIGHT_SENDERS, Publish
from armature.components.models.load import load_model, load_processor
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from armature.components.training.ranks import Ranks
from armature.components.vlm.logprobs import Policy, answer_probe
from armature.components.vlm.publish import Publisher
from tests.builders import make_machine
from tests.refusals import refused
from tests.vlm.conftest import model_settings

DTYPES = ("float32", "bfloat16")


def test_nccl_unique_id_unpickles_as_vllm_class(monkeypatch):
    from armature.components.inference.weights.trainer import _pickled_id, _UniqueId

    path = ["vllm", "distributed", "device_communicators", "pynccl_wrapper"]
    for count in range(1, 5):
        name = ".".join(path[:count])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    theirs = type("ncclUniqueId", (ctypes.Structure,), {"_fields_": [("internal", ctypes.c_byte * 128)]})
    monkeypatch.setattr(sys.modules[".".join(path)], "ncclUniqueId", theirs, raising=False)
    unique = _UniqueId()
    unique.internal[:] = [*range(-64, 64)]
    loaded = pickle.loads(_pickled_id(unique))
    assert type(loaded) is theirs
    assert list(loaded.internal) == [*range(-64, 64)]


async def test_device_transfer_needs_a_trainer(stand_ins, make_pool, checkpoint):
    async with make_pool(stand_ins(1), checkpoint("a"), weight_transfer="nccl") as pool:
        with refused("trainer_needed", "machine.servers.weight_transfer"):
            await pool.sync(checkpoint("b"), 1)


class NeverJoins(BaseHTTPRequestHandler):
    """A server with vLLM's routes that answers every POST with the status `code`, but never joins the trainer's NCCL
    group."""

    code = 200

    def do_GET(self) -> None:
        self._answer(200, {"world_size": 1, "version": "0.26.0"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(self.code, {})

    def _answer(self, code: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


CONNECT = """
import sys, time, torch
from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.replies import Endpoint
from armature.components.inference.weights.trainer import NcclSender
torch.cuda.init()
began = time.monotonic()
try:
    NcclSender([Endpoint(sys.argv[1], "key")], 8.0)
except WeightSyncError as error:
    print(f"after {time.monotonic() - began:.1f} s: {error}")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("code", "output"), [(200, "the servers did not receive the weights in 8 s"), (500, "answered 500")]
)
def test_missing_server_does_not_block_the_transfer(code, output):
    """Neither the sender nor the exit of its process is blocked."""
    handler = type("Handler", (NeverJoins,), {"code": code})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        environment = os.environ | {"NCCL_SOCKET_IFNAME": "=lo", "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", CONNECT, url], env=environment, capture_output=True, text=True, timeout=90
        )
        server.shutdown()
    print(done.stdout)
    assert done.returncode == 0 and output in done.stdout, done.stderr[-3000:]


WAYS = [(way, tied, dtype, None) for way in ("file", "ipc", "nccl") for tied in (True, False) for dtype in DTYPES]
WAYS += [(way, False, "bfloat16", "fp8") for way in ("file", "ipc")]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("way", "tied", "dtype", "quantization"), WAYS)
def test_server_equals_trainer_after_device_transfer(way, tied, dtype, quantization, checkpoints, tmp_path):
    """Three versions; then a trainer that has other weights than it sent is found out.

    A server in 8 bits quantizes each version, and answers nearly as its trainer.
    """
    if torch.cuda.device_count() < (2 if way == "nccl" else 1):
        pytest.skip("NCCL needs a GPU for the trainer and one for the server")
    trainers = [Trainer(folder, dtype) for folder in checkpoints[tied]]
    senders: list[Any] = []
    distances: list[float] = []

    def publish(trainer: Trainer) -> Publish:
        def send(endpoints: Sequence[Endpoint]) -> None:
            torch.cuda.set_device(0)
            if not senders:
                senders.append(WEIGHT_SENDERS[way](endpoints, 60))
            senders[0].send(trainer.publisher.tensors(trainer.policy.model))

        async def work(endpoints: Sequence[Endpoint]) -> None:
            await asyncio.to_thread(send, endpoints)

        return work

    def folder_of(version: int) -> Path:
        trainer, folder = trainers[version % 3], tmp_path / "weights" / str(version)
        trainer.publisher.publish(trainer.policy.model, folder, Ranks())
        return folder

    async def work() -> None:
        settings = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype=dtype, quantization=quantization)
        facts = make_machine(machine(way), **({"sync_tolerance": 0.2} if quantization else {}))
        async with ServerPool(checkpoints[tied][0], settings, facts, tmp_path / "logs") as pool:
            for version in (1, 2, 3):
                trainer = trainers[version % 3]
                answer = trainer.answer(pool)
                await pool.sync(folder_of(version), version, publish(trainer), answer)
                result = await ask_probe(pool.http, pool.replicas[0].endpoint, pool.weights.probe)
                distances.append(distance(result, answer.logprobs))
            print(f"{way} {tied=} {dtype} {quantization}: {distances} nats")
            with refused("served_weights_differ"):
                await pool.sync(folder_of(4), 4, publish(trainers[1]), trainers[2].answer(pool))

    asyncio.run(work())
    if quantization:
        assert min(distances) > 5e-3 and max(distances) < 0.1


class Trainer:
    """The trainer's side of a test: a policy on the first GPU, and the publisher of its weights."""

    def __init__(self, folder: Path, dtype: str) -> None:
        settings = model_settings(dtype=dtype)
        model = load_model(folder, settings)
        self.dtype, self.processor = dtype, load_processor(folder, settings)
        self.publisher = Publisher(model, self.processor, folder / "processor")
        self.policy = Policy(
            model.float().cuda(0),
            logprobs="torch",
            temperature=0.7,
            chunk_tokens=64,
            autocast=torch.bfloat16 if dtype == "bfloat16" else None,
        )

    def answer(self, pool: ServerPool) -> ProbeAnswer:
        return ProbeAnswer(answer_probe(self.policy, self.processor, pool.weights.probe), self.dtype)


def machine(way: str) -> Machine:
    return make_machine(
        servers__python=Path(os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python")),
        servers__gpus=((1,) if way == "nccl" else (0,),),
        weight_transfer=way,
        servers__arguments={"gpu_memory_utilization": 0.2, "enforce_eager": True},
        ready_timeout=400,
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[bool, list[Path]]:
    """Tiny checkpoints with three seeds, once with tied embeddings (under the key True) and once with untied embeddings
    (False)."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        tied: [
            make_tiny_checkpoint(
                "qwen3-vl", root / f"{tied}-{seed}", seed, SMALL.model_copy(update={"tie_embeddings": tied})
            )
            for seed in range(3)
        ]
        for tied in (True, False)
    }
