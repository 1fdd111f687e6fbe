"""Two gloo ranks make the training of one: each with the whole model, and with the model split between them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from components.process import Program
from components.training.ranks import Ranks
from components.vla.train import train

from .conftest import make_job
from .settings import LORA
from .test_train import rows_of, weights_of

SCRIPT = """
import os, sys
from pathlib import Path
from components.training.launch import joined_ranks
from components.vla.job import TrainingJob
from components.vla.train import train

os.environ.update(ARMATURE_RENDEZVOUS=sys.argv[1] + ".store", WORLD_SIZE="2")
other = os.fork()  # as the real parent would have started it, but with what is imported
os.environ.update(RANK="1" if other == 0 else "0", LOCAL_RANK="1" if other == 0 else "0")
with joined_ranks(gpus=False, threads=1, seed=0) as ranks:
    for file in sys.argv[1:]:
        train(TrainingJob.model_validate_json(Path(file).read_text()), ranks)
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""
SAME: dict[str, dict[str, Any]] = {
    "full": {"policy": {"action_mode": "both"}},
    "lora": {"mode": "lora", "lora": LORA, "ema_decay": 0.5},
}
CASES = [("full", False), ("lora", True)]


@pytest.mark.slow
def test_two_ranks_make_the_training_of_one(inputs: dict[str, Path], tmp_path: Path) -> None:
    files, jobs = [], {}
    for name, shard in CASES:
        folder = tmp_path / f"{name}-{shard}"
        common = {"adam_epsilon": 1e-3, "micro_batch_size": 1, **SAME[name]}
        jobs[name, shard] = make_job(inputs, folder, processes=2, shard=shard, **common)
        files.append(folder / "job.json")
        folder.mkdir()
        files[-1].write_text(jobs[name, shard].model_dump_json())
        jobs[name, None] = make_job(inputs, tmp_path / name, **common | {"micro_batch_size": 4})
        train(jobs[name, None], Ranks())
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", *files]
    program = Program(command, log=tmp_path / "log", env={"OMP_NUM_THREADS": "1"})
    assert program.wait(280) == 0, program.tail(60)
    for name, shard in CASES:
        one, two = jobs[name, None], jobs[name, shard]
        for first, second in zip(rows_of(one), rows_of(two), strict=True):
            compared = ("rows", "padding_fraction")  # one example to a forward pass needs no padding
            for key in first.keys() - set(compared):
                assert second[key] == pytest.approx(first[key], rel=1e-3, abs=1e-5), (name, shard, key)
        expected, found = weights_of(one), weights_of(two)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4, msg=f"{name} {shard} {key}")
        assert json.loads((two.checkpoints / "step-000004/state.json").read_text())["step"] == 4
