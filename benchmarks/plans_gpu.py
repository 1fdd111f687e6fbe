"""Predicted against measured seconds of a step of `train-vlm/colors` on the GPUs of this machine.

Usage: python -m benchmarks.plans_gpu [STEPS]: on one GPU with `ipc`, on two with `nccl`, without any on CPU. A run of
32 groups is predicted by the costs of two others, of 16 and 64, on the same GPUs and on the other ones: of the run that
is predicted nothing but its settings is used. The table goes to $OUT/plans-gpu.json as well. ARMATURE_TEST_VLLM_PYTHON
names the Python that has vLLM. Runs that are finished are found again in .armature/plans-gpu.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from armature.components.configuration import load_recipe
from armature.components.contracts.machine import Machine
from armature.components.planning.fitting import measured_runs
from armature.components.planning.records import RunRecords, read_run
from armature.components.rl.settings import TrainVLMSettings
from armature.components.stages import STAGES, open_store, run_stage
from armature.plan_table import beside, table

STORE = Path(".armature/plans-gpu").absolute()
PYTHON = Path(os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python"))
SHOWN = ("wait_for_rollouts", "batch", "train", "sync", "step")
SERVED = Path(__file__).parents[1] / "components/inference/served"
ON_GPU: dict[str, Any] = {
    "trainer_gpus": (0,),
    "server_environment": {"PYTHONPATH": os.pathsep.join([str(SERVED), os.environ.get("PYTHONPATH", "")])},
    "server_arguments": {"gpu_memory_utilization": 0.2, "enforce_eager": True},
}
CPU: dict[str, dict[str, Any]] = {"cpu": {}}
GPUS: dict[str, dict[str, Any]] = {
    "1 GPU, ipc": {"weight_transfer": "ipc", "server_gpus": ((0,),), **ON_GPU},
    "2 GPUs, nccl": {"weight_transfer": "nccl", "server_gpus": ((1,),), **ON_GPU},
}


@dataclass(frozen=True)
class Run:
    """`groups` in a step, played so many steps ahead on one of the layouts; the seed keeps layouts apart."""

    layout: str
    seed: int
    groups: int
    ahead: int = 0

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.groups} groups" + ", one step ahead" * self.ahead


@dataclass(frozen=True)
class Prediction:
    """Seconds of the parts of a step. `unscaled`: of the step, if runs are not brought to one slowdown before."""

    run: str
    costs_of: Sequence[str]
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    unscaled: float


def layouts() -> dict[str, dict[str, Any]]:
    """Those that this machine has the GPUs for."""
    count = torch.cuda.device_count()
    return dict(list(GPUS.items())[:count]) if count else CPU


def machine(layout: str) -> Machine:
    return Machine(store=str(STORE), server_python=PYTHON, ready_timeout=300, **(GPUS | CPU)[layout])


def made(run: Run, steps: int) -> RunRecords:
    """The records of the run, which is made if it was not yet."""
    recipe = load_recipe(
        "train-vlm/colors",
        [
            f"trainer.max_steps={steps}",
            f"trainer.save_every={steps}",
            f"rollouts.groups_per_step={run.groups}",
            f"rollouts.max_staleness={run.ahead}",
            f"rollouts.seed={run.seed}",
            "evaluation.every=0",
        ],
    )
    here = machine(run.layout)

    def stage(name: str, **inputs: Any) -> Any:
        return run_stage(name, recipe.settings_for(STAGES[name].settings), inputs, here)

    path = stage("train-vlm", tasks=stage("tasks"), model=stage("model")).path
    return read_run(path, open_store(here))


def predictions(steps: int) -> Iterator[Prediction]:
    """Each as soon as the runs for it are made."""
    costs: dict[str, list[RunRecords]] = {}
    for seed, layout in enumerate(layouts()):
        costs[layout] = [made(Run(layout, seed, groups), steps) for groups in (16, 64)]
        targets = [Run(layout, seed, 32)]
        if layout not in ("1 GPU, ipc", "cpu"):  # where rollouts and training have nothing to themselves
            targets.append(Run(layout, seed, 32, ahead=1))
        for target in targets:
            measured = made(target, steps)
            yield from (predicted(target, measured, known, costs[known]) for known in costs)
    first, *others = costs
    for other in others:
        yield predicted(Run(first, 0, 32), made(Run(first, 0, 32), steps), other, costs[other])


def predicted(target: Run, measured: RunRecords, layout: str, runs: Sequence[RunRecords]) -> Prediction:
    settings: TrainVLMSettings = measured.settings

    def simulated(known: Sequence[RunRecords]) -> Mapping[str, float]:
        run = measured_runs(known, machine(layout)).runs[0]
        changed = {"rollouts": settings.rollouts, "batches": settings.batches, "trainer": settings.trainer}
        return replace(run, **changed).simulate().timings

    unscaled = [
        replace(one, steps=[{key: row[key] for key in row if key != "timing/cpu"} for row in one.steps]) for one in runs
    ]
    return Prediction(
        target.name,
        [f"{layout}, {one.settings.rollouts.groups_per_step} groups" for one in runs],
        {part: simulated(runs)[f"timing/{part}"] for part in SHOWN},
        {part: measured.mean(f"timing/{part}") for part in SHOWN},
        simulated(unscaled)["timing/step"],
    )


def main(steps: int) -> None:
    found = []
    for each in predictions(steps):
        found.append(each)
        rows = [["run", "costs of", *(name for part in SHOWN for name in (part, "measured", "difference")), "unscaled"]]
        for one in found:
            parts = [cell for part in SHOWN for cell in _cells(one, part)]
            rows.append([one.run, " and ".join(one.costs_of), *parts, beside(one.unscaled, one.measured["step"])[1]])
        print("\n".join(table(rows)), flush=True)
    out = Path(os.environ.get("OUT", ".")) / "plans-gpu.json"
    out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


def _cells(one: Prediction, part: str) -> list[str]:
    predicted, measured = one.predicted[part], one.measured[part]
    return [f"{predicted:.3f}", f"{measured:.3f}", beside(predicted, measured)[1]]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 14)
