"""Host memory of a rank while it saves a checkpoint, with the model split over two."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import Row

RANKS = 2
SIZES = {"hidden_size": 512, "intermediate_size": 4096, "layers": 8}
MIB = 2**20


def measure() -> list[Row]:
    from armature.components.contracts.machine import Machine, MachineTrainer
    from armature.components.families.tiny import TinySettings
    from armature.components.models.tiny import make_tiny_checkpoint
    from armature.components.training.processes import TrainerProcesses, private_folder

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = TinySettings.model_validate(SIZES)
        checkpoint = make_tiny_checkpoint("qwen2-vl", folder / "model", 0, settings)
        program = TrainerProcesses.of(Machine(trainer=MachineTrainer(processes=RANKS), threads=1)).start(
            ["-m", __spec__.name, checkpoint, folder],
            rendezvous=private_folder(folder / "rendezvous"),
            log=folder / "log",
        )
        if code := program.wait(600):
            raise RuntimeError(f"exit code {code}: {program.tail(40)}")
        result = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    rows = []
    for rank, one in enumerate(result):
        note = f"peak of the process above what it held before; {one['parameters'] / 1e6:.0f} M parameters in fp32"
        rows.append(
            Row(
                f"saving, rank {rank} of {RANKS}",
                one["save"] / MIB,
                one["shard"] / MIB,
                "its shard of weights and moments",
                "MiB",
                "lower",
                f"{note}; training waits {one['wait_s'] * 1e3:.0f} ms of {one['save_s'] * 1e3:.0f} ms",
            )
        )
    return rows


def _rank(checkpoint: Path, folder: Path) -> None:
    """Measure the memory and time that one rank needs, and write them to rank-N.json."""
    import torch

    from armature.components.contracts.machine import Machine, MachineTrainer
    from armature.components.models.settings import ModelSettings
    from armature.components.training.checkpoints import Checkpoints
    from armature.components.training.engine import ParameterGroup, TrainingEngine
    from armature.components.training.ranks import joined
    from armature.components.training.service_settings import service_settings
    from armature.components.vlm.client import TrainerPolicySettings
    from armature.components.vlm.settings import TrainerSettings
    from armature.components.vlm.worker import TrainerWorker

    policy = TrainerPolicySettings(
        model_path=checkpoint,
        model=ModelSettings(source="tiny", dtype="float32"),
        trainer=TrainerSettings(learning_rate=1e-4, max_steps=1),
        temperature=1.0,
        images=folder / "images",
    )
    machine = Machine(trainer=MachineTrainer(processes=RANKS, loader_workers=0), threads=1)
    settings = service_settings(policy, machine, folder / "trainer")
    split = settings.processes.model_copy(update={"sharding": "full"})
    settings = settings.model_copy(update={"processes": split})
    with joined(split, seed=0) as ranks:
        engine = TrainerWorker(settings, ranks).learner
        for parameter in engine.trained:
            parameter.grad = torch.ones_like(parameter)
        engine.optimizer.step()
        engine.optimizer.zero_grad(set_to_none=True)
        checkpoints = Checkpoints(folder / "checkpoints", {}, ranks, keep=1)
        weight = torch.nn.Linear(1, 1)
        group = ParameterGroup("all", list(weight.parameters()), lambda step: 0.0, 0.0)
        small = TrainingEngine(weight, [group], ranks, sharded=False, betas=(0.9, 0.9), eps=1.0, max_grad_norm=1.0)
        checkpoints.save(small, {})  # imports what saving needs
        checkpoints.wait()
        ranks.broadcast(None)
        before, began = _reset(), time.perf_counter()
        checkpoints.save(engine, {})
        waited = time.perf_counter() - began
        checkpoints.wait()
        result = {
            "save": _peak() - before,
            "shard": 3 * sum(p.to_local().nbytes for p in engine.trained),
            "parameters": sum(p.numel() for p in engine.trained),
            "wait_s": waited,
            "save_s": time.perf_counter() - began,
        }
        (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(result))


def _reset() -> int:
    """Return the number of bytes that this process holds, without memory it has freed. The measurement of its peak
    starts again."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), Path(sys.argv[2]))
