"""Training on two ranks equals training on one: with whole copies, fully sharded, and sharded within each node."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from armature.components.artifacts.json_lines import History
from armature.components.contracts.cluster import ClusterSettings, TrainerBundle
from armature.components.machine.process import Program
from armature.components.robots.imitation.train import PolicyTrainerClient, train
from tests.builders import make_machine

from .conftest import Silent, make_job
from .settings import LORA
from .test_train import rows_of, weights_of

SCRIPT = """
import os, pickle, sys
from armature.components.training.ranks import joined
from tests.robots.imitation.conftest import Job

os.environ.update(ARMATURE_RENDEZVOUS=sys.argv[1] + ".store", WORLD_SIZE="2")
other = os.fork()  # like the service's worker, but with modules imported
os.environ.update(RANK="1" if other == 0 else "0", LOCAL_RANK="1" if other == 0 else "0")
jobs = [pickle.load(open(file, "rb")) for file in sys.argv[1:]]
with joined(jobs[0].service.processes, seed=0) as ranks:
    for job in jobs:
        job.train(ranks)
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""
ROOT = Path(__file__).parents[3]
RANKS: dict[str, Any] = {"threads": 1, "loader_workers": 0, "ready_timeout": 120}
CLUSTER = ClusterSettings(address="auto", trainer=TrainerBundle())
MACHINES = {
    "copies": make_machine(trainer__processes=2, **RANKS),
    "full": make_machine(trainer__processes=2, trainer__sharding="full", **RANKS),
    "hybrid": make_machine(trainer__nodes=2, cluster=CLUSTER, trainer__sharding="hybrid", **RANKS),
}
SAME: dict[str, dict[str, Any]] = {
    "full": {"policy": {"action_mode": "both"}},
    "lora": {"mode": "lora", "lora": LORA, "ema_decay": 0.5, "file_shuffle": {"lanes": 2, "window": 2}},
}
CASES = [("full", "copies"), ("full", "full"), ("lora", "full"), ("lora", "hybrid")]


@pytest.mark.slow
def test_two_ranks_train_like_one(inputs: dict[str, Path], tmp_path: Path) -> None:
    files, jobs = [], {}
    for name, sharding in CASES:
        folder = tmp_path / f"{name}-{sharding}"
        common = {"adam_epsilon": 1e-3, "micro_batch_size": 1, **SAME[name]}
        jobs[name, sharding] = make_job(inputs, folder, machine=MACHINES[sharding], **common)
        files.append(folder / "job.pickle")
        files[-1].write_bytes(pickle.dumps(jobs[name, sharding]))
        if (name, None) not in jobs:
            jobs[name, None] = make_job(inputs, tmp_path / name, **common | {"micro_batch_size": 4})
            jobs[name, None].train()
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", *files]
    program = Program(command, log=tmp_path / "log", env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert program.wait(280) == 0, program.tail(60)
    for name, sharding in CASES:
        one, two = jobs[name, None], jobs[name, sharding]
        for first, second in zip(rows_of(one), rows_of(two), strict=True):
            compared = ("rows", "padding_fraction")  # one example to a forward pass needs no padding
            for key in first.keys() - set(compared):
                assert second[key] == pytest.approx(first[key], rel=1e-3, abs=1e-5), (name, sharding, key)
        expected, weights = weights_of(one), weights_of(two)
        assert expected.keys() == weights.keys()
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=1e-4, msg=f"{name} {sharding} {key}")
        assert json.loads((two.service.checkpoints / "step-000002/state.json").read_text())["step"] == 2


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", SAME)
def test_two_gpus_train_like_one(inputs: dict[str, Path], tmp_path: Path, case: str) -> None:
    """On two GPUs the model is sharded, and the second half is resumed from a checkpoint after a restart."""
    jobs = []
    for gpus in ((0,), (0, 1)):
        machine = make_machine(trainer__processes=len(gpus), trainer__gpus=gpus, loader_workers=1, ready_timeout=120)
        common = {"adam_epsilon": 1e-3, "micro_batch_size": 4 // len(gpus), "save_every": 2}
        job = make_job(inputs, tmp_path / str(len(gpus)), machine=machine, **common, **SAME[case])
        history, settings = History(job.history), job.training.settings.training
        with PolicyTrainerClient(job.training, machine, job.service.workspace) as trainer:
            for step in (1, 2):
                trainer.step(step)
            trainer.save()
            trainer.settle()
            trainer.restart()
            train(trainer, settings, history, Silent(), job.checkpoint)
        jobs.append(job)
    expected, weights = map(weights_of, jobs)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, atol=1e-4, rtol=1e-3, msg=f"{case} {key}")
