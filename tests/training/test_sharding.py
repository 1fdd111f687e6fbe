"""FSDP2 on two gloo ranks: the same step as one rank, and checkpoints that either can read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from components.batches.table import write_batch
from components.contracts.machine import Machine
from components.process import Program
from components.training.client import TrainerClient
from components.training.service_settings import PolicySettings, service_settings

from .conftest import LORA, Tiny, model_settings, trainer_settings

SCRIPT = """
import json, sys
from pathlib import Path
from components.training.launch import joined
from components.training.service_settings import ServiceSettings
from components.training.worker import Worker

settings = ServiceSettings.model_validate_json(Path(sys.argv[1]).read_text())
batches = sys.argv[2].split(",")
with joined(settings) as ranks:
    worker = Worker(settings, ranks)
    done = worker.run({"name": "resume"}, [])
    results = []
    for step, batch in enumerate(batches, 1):
        command = {"name": "step", "step": step, "batch": batch}
        if step > done:
            results.append(worker.run(command, worker.check(command)))
    scores = worker.run({"name": "score", "batch": batches[0]}, worker.check({"name": "score", "batch": batches[0]}))
    worker.run({"name": "save"}, [])
    worker.run({"name": "publish", "folder": str(settings.workspace / "out"), "version": 0}, [])
    if ranks.first:
        (settings.workspace / "results.json").write_text(json.dumps([results, scores]))
"""


def run(
    tiny: Tiny, folder: Path, batches: list[Path], processes: int, shard: bool, lora: Any, **trainer: Any
) -> tuple[Any, Any, Any]:
    policy = PolicySettings(
        model_path=tiny.folder,
        model=model_settings(lora=lora),
        trainer=trainer_settings(adam_epsilon=1e-3, **trainer),
        temperature=1.0,
        images=tiny.images.root,
    )
    machine = Machine(trainer_processes=processes, threads=1, loader_workers=0)
    settings = service_settings(policy, machine, folder).model_copy(update={"shard": shard})
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(settings.model_dump_json())
    (folder / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    program = Program(
        [*torchrun, str(folder / "script.py"), str(folder / "settings.json"), ",".join(map(str, batches))],
        log=folder / "log",
        env={"OMP_NUM_THREADS": "1"},
    )
    assert program.wait(280) == 0, program.tail(60)
    metrics, scores = json.loads((folder / "results.json").read_text())
    return metrics, scores, load_file(folder / "out" / "model.safetensors")


def batch_folders(tiny: Tiny, root: Path) -> list[Path]:
    folders = [root / f"batch-{step}" for step in (1, 2, 3)]
    for step, folder in enumerate(folders, 1):
        folder.mkdir()
        write_batch(folder, tiny.samples(6, seed=step))
    return folders


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_sharded_steps_are_those_of_one_rank(tiny: Tiny, tmp_path: Path, lora: Any) -> None:
    batches = batch_folders(tiny, tmp_path)
    one, scores_one, weights_one = run(tiny, tmp_path / "one", batches, 1, False, lora)
    run(tiny, tmp_path / "two", batches[:2], 2, True, lora)
    two, scores_two, weights_two = run(tiny, tmp_path / "two", batches, 2, True, lora)  # resumes after step 2
    assert len(two) == 1
    for name in ("loss", "importance_ratio", "entropy", "mismatch_kl", "grad_norm"):
        assert two[0][name] == pytest.approx(one[2][name], rel=1e-3, abs=1e-5), name
    for a, b in zip(scores_one, scores_two, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=0)
    assert weights_one.keys() == weights_two.keys()
    for name, value in weights_one.items():
        torch.testing.assert_close(value, weights_two[name], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_rank_without_a_token_to_train_on_takes_part(tiny: Tiny, tmp_path: Path) -> None:
    batches = batch_folders(tiny, tmp_path)[:1]
    one_micro_batch = {"max_tokens_per_micro_batch": 16384, "max_rows_per_micro_batch": 256}
    one, _, weights_one = run(tiny, tmp_path / "one", batches, 1, False, None, **one_micro_batch)
    two, _, weights_two = run(tiny, tmp_path / "two", batches, 2, True, None, **one_micro_batch)
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-4)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-4)
    for name, value in weights_one.items():
        torch.testing.assert_close(value, weights_two[name], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("autocast", ["none", "bf16"])
def test_two_gpus_make_the_step_of_one(tiny: Tiny, tmp_path: Path, lora: Any, autocast: str) -> None:
    """In fp32 up to the order of sums; in bf16 up to its eight bits. The second half is resumed."""
    batches = batch_folders(tiny, tmp_path)
    dtype = "float32" if autocast == "none" else "bfloat16"
    policy = PolicySettings(
        model_path=tiny.folder,
        model=model_settings(lora=lora, dtype=dtype, gradient_checkpointing=True),
        trainer=trainer_settings(adam_epsilon=1e-3, autocast=autocast),
        temperature=1.0,
        images=tiny.images.root,
    )
    results = []
    for gpus in ((0,), (0, 1)):
        machine = Machine(trainer_processes=len(gpus), trainer_gpus=gpus, loader_workers=2)
        with TrainerClient(policy, machine, tmp_path / f"gpus-{len(gpus)}") as trainer:
            metrics = [trainer.step(k, batches[k - 1]) for k in (1, 2)]
            trainer.save()
            trainer.step(3, batches[2])
            trainer.restart()
            assert trainer.resume() == 2
            metrics.append(trainer.step(3, batches[2]))
            scores = np.concatenate(trainer.score(batches[0]))
            folder = tmp_path / f"published-{len(gpus)}"
            trainer.publish(folder, 3)
            results.append((metrics, scores, load_file(folder / "model.safetensors")))
    (one, scores_one, weights_one), (two, scores_two, weights_two) = results
    exact = autocast == "none"
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "importance_ratio", "entropy", "mismatch_kl", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-3 if exact else 0.05, abs=1e-5 if exact else 0.01), name
    print(autocast, lora is not None, "largest difference of log-probs", np.abs(scores_one - scores_two).max())
    np.testing.assert_allclose(scores_one, scores_two, atol=1e-3 if exact else 0.1)
    assert weights_one.keys() == weights_two.keys()
    for name, value in weights_one.items():
        torch.testing.assert_close(value, weights_two[name], atol=1e-4 if exact else 1e-2, rtol=1e-3 if exact else 0.05)
