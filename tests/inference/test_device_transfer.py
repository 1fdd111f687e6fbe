"""Weights from the trainer's GPUs to a real vLLM server. Needs CUDA and vLLM >= 0.26 for it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from components.contracts.errors import WeightSyncError
from components.contracts.machine import Machine
from components.inference.endpoint import Endpoint
from components.inference.pool import ServerPool
from components.inference.settings import EvaluationSamplingSettings, ServerSettings

GREEDY = EvaluationSamplingSettings(temperature=0.0, max_tokens=4, top_p=1.0, top_k=0)
SETTINGS = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")
MESSAGES = [{"role": "user", "content": "Which colour is it?"}]


def test_the_unique_id_unpickles_as_the_workers_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from components.inference.weights.nccl import _pickled, _UniqueId

    path = ["vllm", "distributed", "device_communicators", "pynccl_wrapper"]
    for count in range(1, 5):
        name = ".".join(path[:count])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    theirs = type("ncclUniqueId", (ctypes.Structure,), {"_fields_": [("internal", ctypes.c_byte * 128)]})
    monkeypatch.setattr(sys.modules[".".join(path)], "ncclUniqueId", theirs, raising=False)
    unique = _UniqueId()
    unique.internal[:] = [*range(-64, 64)]
    loaded = pickle.loads(_pickled(unique))
    assert type(loaded) is theirs
    assert list(loaded.internal) == [*range(-64, 64)]


def test_without_the_trainer_there_is_nothing_to_send(
    stand_ins: Callable[..., list[object]], make_pool: Callable[..., ServerPool], checkpoint: Callable[..., Path]
) -> None:
    async def work() -> None:
        async with make_pool(stand_ins(1), checkpoint("a"), weight_transfer="nccl") as pool:
            with pytest.raises(WeightSyncError, match="only the trainer"):
                await pool.sync(checkpoint("b"), 1)

    asyncio.run(work())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["file", "ipc", "nccl"])
def test_the_server_answers_with_the_weights_that_were_sent(
    way: str, checkpoints: tuple[Path, Path], started_with_new: list[float], tmp_path: Path
) -> None:
    if torch.cuda.device_count() < (2 if way == "nccl" else 1):
        pytest.skip("NCCL needs a GPU for the trainer and one for the server")
    from safetensors.torch import load_file

    from components.inference.weights import WEIGHT_SENDERS

    old, new = checkpoints

    async def publish(endpoints: Sequence[Endpoint]) -> None:
        def send() -> None:
            torch.cuda.set_device(0)
            sender = WEIGHT_SENDERS[way](endpoints, 60)
            sender.send(load_file(old / "model.safetensors", device="cuda:0"))
            sender.send(load_file(new / "model.safetensors", device="cuda:0"))

        await asyncio.to_thread(send)

    async def work() -> tuple[list[float], list[float]]:
        async with ServerPool(old, SETTINGS, machine(way), tmp_path / "logs") as pool:
            before = (await pool.complete(MESSAGES, GREEDY, 0)).logprobs.tolist()
            await pool.sync(new, 1, publish)
            return before, (await pool.complete(MESSAGES, GREEDY, 0)).logprobs.tolist()

    before, synced = asyncio.run(work())
    np.testing.assert_allclose(synced, started_with_new, atol=1e-4)
    assert np.abs(np.subtract(before, synced)).max() > 1e-2


def machine(way: str) -> Machine:
    return Machine(
        server_python=Path(os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python")),
        server_gpus=((1,) if way == "nccl" else (0,),),
        weight_transfer=way,
        server_arguments={"gpu_memory_utilization": 0.2, "enforce_eager": True},
        ready_timeout=400,
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from components.models.tiny import make_tiny_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    return make_tiny_checkpoint("qwen2-vl", root / "0", 0), make_tiny_checkpoint("qwen2-vl", root / "1", 1)


@pytest.fixture(scope="module")
def started_with_new(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What a server answers that was started with the new weights."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    async def work() -> list[float]:
        async with ServerPool(checkpoints[1], SETTINGS, machine("file"), tmp_path_factory.mktemp("logs")) as pool:
            return (await pool.complete(MESSAGES, GREEDY, 0)).logprobs.tolist()

    return asyncio.run(work())
