"""Devices are counted among those that this process may use, as torch counts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from armature.components.contracts.cluster import ClusterSettings
from armature.components.contracts.machine import Machine, available_cpus
from armature.components.inference.command import server_environment
from armature.components.machine.resources import gpu_count, visible_devices
from armature.components.rl.config import MultimodalRLConfig
from armature.components.rl.program_machine import SHARED_GPU, default_processes, serving, with_ranks
from armature.components.training.processes import TrainerProcesses
from armature.train_multimodal import MultimodalFile, divide_gpus
from tests.builders import make_machine
from tests.refusals import refused

LISTED = "GPU 0: A\n  MIG 1g.10gb Device 0: (UUID: MIG-x)\nGPU 1: B\nGPU 2: C\nGPU 3: D\n"
Driver = Callable[[str], None]


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Driver:
    """A function that installs a stand-in for nvidia-smi with the given output. Like the real tool, it ignores
    CUDA_VISIBLE_DEVICES."""

    def lists(text: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return lists


@pytest.mark.parametrize(
    ("arguments", "gpus", "names"),
    [
        (None, (1, 0), "1,0"),
        ("2,3", (0, 1), "2,3"),
        ("2,3", (1,), "3"),
        ("GPU-8f2e, GPU-11aa", (1,), "GPU-11aa"),
        ("MIG-77", (0,), "MIG-77"),
        ("2,3", (), ""),
        (None, (), ""),
    ],
)
def test_programs_get_devices_within_cuda_visible_devices(arguments, gpus, names, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if arguments is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", arguments)
    assert visible_devices(gpus) == names
    served = server_environment(Machine(), api_key="", gpus=gpus)
    assert served["CUDA_VISIBLE_DEVICES"] == names


@pytest.mark.parametrize(
    ("arguments", "gpu", "left"), [("2,3", 2, 2), ("", 0, 0), ("-1", 0, 0), ("0,-1,2", 1, 1), ("5,,6", 1, 1)]
)
def test_rejects_device_outside_cuda_visible_devices(arguments, gpu, left, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", arguments)
    with refused("gpu_not_visible", gpu, left) as caught:
        visible_devices((gpu,))
    assert not arguments or arguments not in caught.value.what


def test_counts_visible_devices(driver, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver(LISTED)
    assert gpu_count() == 4
    for arguments, count in (("2,3", 2), ("", 0), ("0,1,2,3,4,5", 4), ("GPU-11aa", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", arguments)
        assert gpu_count() == count


def test_rank_has_the_devices_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    processes = TrainerProcesses(gpus=(2,))
    program = processes.start(["-c", script], rendezvous=tmp_path, log=tmp_path / "log")
    assert program.wait(60) == 0
    assert (tmp_path / "log").read_text().split() == ["7"]


def test_cluster_servers_need_no_local_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bundle = {"num_cpus": 1, "tensor_parallel_size": 2}
    machine = make_machine(cluster=ClusterSettings.model_validate({"address": "127.0.0.1:6379", "servers": bundle}))
    served = server_environment(machine, api_key="", gpus=machine.gpus_of_server(0))
    assert served["CUDA_VISIBLE_DEVICES"] == "0,1"  # what Ray says to its actor takes its place


def test_train_multimodal_server_gets_the_next_device(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")
    driver(LISTED)
    tables = {"model": "m", "env": {"id": "e"}, "inference": {"gpus": 2}}
    assert divide_gpus(MultimodalFile.model_validate(tables)) == (1, 2)
    with refused("too_few_gpus", "inference.gpus = 3", "trainer.gpus = 1"):
        divide_gpus(MultimodalFile.model_validate(tables | {"inference": {"gpus": 3}}))


def test_gpus_of_a_script_are_divided_between_ranks_and_servers(driver, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llava", "max_position_embeddings": 4096}')
    driver(LISTED)
    count = gpu_count()
    half = with_ranks(Machine(), default_processes())
    assert half.trainer.gpus == tuple(range(count // 2))
    machine, served = serving(half, tmp_path, most_images=20, bf16=True)
    assert machine.servers.gpus == tuple((number,) for number in range(count // 2, count))
    assert (served.max_model_len, served.max_images_per_prompt, served.dtype) == (4096, 20, "bfloat16")
    assert served.max_videos_per_prompt == 0
    assert serving(half, tmp_path, most_images=20, bf16=True, most_videos=1)[1].max_videos_per_prompt == 1
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "max_position_embeddings": 4096}')
    assert serving(half, tmp_path, most_images=20, bf16=True)[1].max_videos_per_prompt == 20
    machine, served = serving(with_ranks(Machine(), count), tmp_path, 0, bf16=False)
    assert machine.servers.gpus == tuple((number,) for number in range(count))
    assert (machine.servers.arguments, served.dtype) == ({"gpu_memory_utilization": SHARED_GPU}, "float32")
    assert MultimodalRLConfig().bf16
    with refused("too_few_gpus", f"processes = {count + 1}"):
        with_ranks(Machine(), count + 1)


def test_cpu_count_respects_affinity(tmp_path):
    bound = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])"
    code = f"{bound}; from armature.components.contracts.machine import available_cpus; print(available_cpus())"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"1\n"


@pytest.mark.parametrize(
    ("quota", "share"), [("max 100000", 64), ("150000 100000", 1), ("250000 100000", 2), ("5 100", 1)]
)
def test_cpu_count_respects_container_limit(tmp_path, monkeypatch, quota, share):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert available_cpus(tmp_path / "cpu.max") == share
