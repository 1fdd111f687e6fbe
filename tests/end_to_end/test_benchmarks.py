"""Benchmarks at toy sizes on a CPU, as far as they start servers, trainers or simulators; see tests/benchmarks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import lerobot_gpu, rl_step_gpu, step_gpu
from tests.robots.libero.simulated import needs_libero

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.long]

SIZES: dict[str, dict[str, Any]] = {
    "checkpoints": {"SIZES": {"hidden_size": 64, "intermediate_size": 128, "layers": 2}},
    "determinism": {"ROUNDS": 1, "TOKENS": 2, "AT_ONCE": {1: 1}},
    "in_flight": {"ROUNDS": 1, "SHORT": 0.01, "LONG": 0.05},
    "logprobs": {},  # a child reads the sizes again
    "overhead": {"STEPS": 2, "GENERATE": 0.01, "TRAIN": 0.01, "SYNC": 0.01},
    "policy_server": {"CLIENTS": 2, "ANSWERS": 1, "ROUNDS": 1, "BATCH": 2},
    "pool": {"REQUESTS": 4, "CONCURRENT": 2, "TOKENS": 2, "ROUNDS": 1},
}
SIMULATED: dict[str, dict[str, Any]] = {
    "episodes": {"EPISODES": 2, "STEPS": 2, "BATCH": 2, "ROUNDS": 1},
    "libero": {"CHUNK": 2, "ROUNDS": 1, "DRAWN": 1, "STEPPED": 2, "RESETS": 1, "SIDES": (64,)},
}
GPU_SCRIPTS = [
    ["attention_gpu", "small", "qwen2.5-vl"],
    ["bitwise_gpu", "small", "kernels"],
    ["delta_gpu", "small"],
    ["experts_gpu", "small"],
    ["families_gpu", "small", "smolvlm"],
    ["memory_gpu", "small"],
    ["scaling_gpu", "small", "one", "copies", "A"],
    ["sync_gpu", "small"],
    ["tools_gpu"],
]
"""Arguments of each benchmark that needs a GPU: the name of the script, then arguments that make it small."""
ROBOT = [
    "demonstrations.episodes_per_task=1",
    "training.max_steps=2",
    "training.warmup_steps=1",
    "training.save_every=2",
    "training.batch_size=4",
    "training.micro_batch_size=4",
    "trainer.max_steps=1",
    "rollouts.groups_per_step=1",
    "rollouts.group_size=2",
    "rollouts.max_steps=10",
    "evaluation.episodes_per_task=1",
    "evaluation.initial_states=[0]",
    "evaluation.max_steps.libero_spatial=10",
]
ROBOT_SCRIPTS = [
    ["vla_rl_gpu", "--small"],
    ["robot_rl_gpu", "train-vla-rl/tiny", "--seeds", "0", *(word for one in ROBOT for word in ("--set", one))],
]


def measure(name: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(f"benchmarks.{name}")
    for key, value in sizes.items():
        monkeypatch.setattr(module, key, value)
    rows = module.measure()
    assert rows and all(math.isfinite(row.ours) and row.baseline > 0 for row in rows)


@pytest.mark.parametrize("name", SIZES)
def test_benchmark_runs_at_toy_size(name, monkeypatch):
    measure(name, SIZES[name], monkeypatch)


@needs_libero
@pytest.mark.parametrize("name", SIMULATED)
def test_benchmark_of_simulators_runs_at_toy_size(name, monkeypatch):
    measure(name, SIMULATED[name], monkeypatch)


@pytest.mark.parametrize(
    "words",
    [*GPU_SCRIPTS, *(pytest.param(words, marks=needs_libero) for words in ROBOT_SCRIPTS)],
    ids=lambda words: words[0],
)
def test_gpu_script_runs_small_on_a_cpu(words, tmp_path):
    # The project's folder is found by its path, since some keep runs in the working folder.
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path), "PYTHONPATH": paths}
    environment |= {"ARMATURE_TEST_VLLM_PYTHON": str(ROOT / ".venv-vllm/bin/python")}
    name, *arguments = words
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], cwd=tmp_path, env=environment)
    assert done.returncode == 0


def test_our_side_of_the_step_benchmark_runs():
    """Keeping activations changes no gradient, and where no prompt is shared more tokens are computed."""
    ways = ["Q,2000,packing", "Q,2000,packing,keep", "U,2000,packing", "A,2000,packing"]
    shared, saved, alone, image = step_gpu.sides(ways, (), 1, small=not torch.cuda.is_available())
    assert saved["norm"] == pytest.approx(shared["norm"], rel=1e-5)
    assert alone["computed"] > 2 * shared["computed"] == 2 * saved["computed"]
    assert image["norm"] > 0


def test_our_side_of_the_policy_benchmark_runs():
    ours = lerobot_gpu.Side("ours", [sys.executable, "-m", "benchmarks.policy_ours", "small"])
    try:
        ours.ask(do="open", case="full 8")
        assert ours.answer()["loss"] > 0
        ours.ask(do="measure", count=1)
        assert len(ours.answer()["seconds"]) == 1
    finally:
        ours.stop()


def test_our_side_of_the_whole_step_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_step_gpu, "STEPS", 1)
    question = rl_step_gpu.checkpoint(tmp_path / "model")
    result = rl_step_gpu.ours(tmp_path / "model", question, "in turn", tmp_path / "store")
    assert len(result["seconds"]) == 1 and max(result["kl"]) < 1e-4
    assert json.dumps(result)
