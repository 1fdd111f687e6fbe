"""Adapters that servers hold beside the weights they started with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armature.components.contracts.machine import Machine
from armature.components.inference.command import ServedAdapters, server_command, server_environment
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import ServerSettings
from tests.builders import make_machine
from tests.inference.conftest import MESSAGES, SAMPLING
from tests.refusals import refused

SETTINGS = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")


def value_of(command: list[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


def test_server_takes_adapters_only_if_configured(checkpoint):
    model, machine = checkpoint("w"), Machine()
    plain = server_command(model, SETTINGS, machine, port=1, gpus=())
    assert not any("lora" in word for word in plain)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in server_environment(machine, api_key="k", gpus=())
    for rank, room in ((1, "1"), (5, "8"), (16, "16"), (65, "128")):
        command = server_command(model, SETTINGS, machine, port=1, gpus=(), adapters=ServedAdapters(rank))
        assert value_of(command, "max-lora-rank") == room and "--enable-tower-connector-lora" not in command
    command = server_command(model, SETTINGS, machine, port=1, gpus=(), adapters=ServedAdapters(8, vision=True))
    assert "--enable-tower-connector-lora" in command
    variables = server_environment(machine, api_key="k", gpus=(), adapters=ServedAdapters(8))
    assert variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with refused("adapter_rank_too_large", 512, 513):
        ServedAdapters(513).arguments()


def test_adapters_are_written_as_files(checkpoint, tmp_path):
    with refused("adapters_need_files", "nccl"):
        ServerPool(
            checkpoint("w"), SETTINGS, make_machine(weight_transfer="nccl"), tmp_path, adapters=ServedAdapters(8)
        )


@pytest.fixture
def adapter_pool(tmp_path) -> Callable[..., ServerPool]:
    def make(servers: list[Any], weights: Path) -> ServerPool:
        machine = make_machine(
            endpoints=tuple(one.url for one in servers), generation_timeout=3.0, ready_timeout=10.0, sync_timeout=5.0
        )
        return ServerPool(weights, SETTINGS, machine, tmp_path / "logs", adapters=ServedAdapters(8))

    return make


async def test_requests_name_the_adapter_of_their_version(stand_ins, adapter_pool, checkpoint, tmp_path):
    servers = stand_ins(2)
    async with adapter_pool(servers, checkpoint("base")) as pool:
        assert [server.calls for server in servers] == 2 * [["/resume"]]  # they keep what they were started with
        assert (await pool.complete(MESSAGES, SAMPLING, 0)).policy_version == 0
        for version in (1, 2, 3):
            await pool.sync(tmp_path / f"{version:06d}", version)
            assert (await pool.complete(MESSAGES, SAMPLING, version)).policy_version == version
        assert [server.adapters for server in servers] == 2 * [{"policy-000003": str(tmp_path / "000003")}]
        assert all("/reset_prefix_cache" in server.calls for server in servers)
    named = [body["model"] for server in servers for body in server.bodies]
    assert sorted(named) == ["policy", "policy-000001", "policy-000002", "policy-000003"]
    assert not any("/collective_rpc" in server.calls for server in servers)


async def test_restarted_server_gets_the_adapter(stand_ins, adapter_pool, checkpoint, tmp_path):
    (server,) = stand_ins(1)
    async with adapter_pool([server], checkpoint("base")) as pool:
        await pool.sync(tmp_path / "000001", 1)
        server.start_again()
        completion = await pool.complete(MESSAGES, SAMPLING, 0)
        assert (completion.policy_version, completion.text) == (1, "000001")
        assert pool.statistics.retries and server.adapters == {"policy-000001": str(tmp_path / "000001")}


async def test_server_without_lora_fails_the_sync(stand_ins, adapter_pool, checkpoint, tmp_path):
    (server,) = stand_ins(1)
    server.adapters = None
    async with adapter_pool([server], checkpoint("base")) as pool:
        with refused("server_refuses_weights", "load_lora_adapter", 404, "armature serve MODEL --max-lora-rank"):
            await pool.sync(tmp_path / "000001", 1)
