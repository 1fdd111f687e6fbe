"""A short training that can be disturbed: the stage train-vlm of train-vlm/colors, as a user starts it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from armature.components.configuration import CONFIGS, load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.machine import Machine

STEPS = 10
RECIPE = "train-vlm/colors"
OVERRIDES = (
    f"trainer.max_steps={STEPS}",
    "trainer.save_every=3",
    "evaluation.every=4",
    "evaluation.heldout_tasks=8",
    "rollouts.groups_per_step=4",
    "rollouts.group_size=4",
    "rollouts.max_staleness=1",
    "batches.skip_zero_advantage=false",
    "preflight.groups=1",
    "model.tiny.format.steps=20",
)


def make_inputs(store: Path) -> dict[str, Path]:
    """Make the artifacts `tasks` and `model`, which all runs have as inputs, and return their folders by name."""
    recipe = load_recipe(RECIPE, [*OVERRIDES, f'machine.store="{store}"'])
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    names = ("tasks", "model")
    return {name: run_stage(name, recipe.settings_for(STAGES[name].settings), {}, machine).path for name in names}


@dataclass(frozen=True)
class Training:
    """One run with a store of its own. Each call of `start` runs the same command again.

    `machine` are settings of the section `machine`, written "key=value".
    """

    folder: Path
    inputs: dict[str, Path]
    machine: tuple[str, ...] = ()

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def log(self) -> Path:
        return self.folder / "run.log"

    def start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        overrides = (*OVERRIDES, f'machine.store="{self.store}"')
        words = [word for override in overrides for word in ("--set", override)]
        words += [word for fact in self.machine for word in ("--machine", fact)]
        words += [word for name, path in self.inputs.items() for word in ("--input", f"{name}={path}")]
        command = [sys.executable, "-m", "armature", "stage", "train-vlm", "--config", str(CONFIGS / f"{RECIPE}.toml")]
        with self.log.open("ab") as log:
            return subprocess.Popen([*command, *words, "--out", str(self.folder / "made")], stdout=log, stderr=log)

    def steps_done(self) -> int:
        histories = list((self.store / "workspaces").glob("train-vlm-*/history.jsonl"))
        lines = histories[0].read_text(errors="replace").splitlines() if histories else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def weights_digest(self) -> str:
        """Return one digest of the final weights, the weights of the best evaluation, and the results of all
        evaluations together."""
        (last,) = (self.store / "workspaces").glob(f"train-vlm-*/weights/{STEPS:06d}/model.safetensors")
        evaluations = sorted((self.store / "evaluations").glob("*/results.parquet"))
        digest = hashlib.sha256()
        for path in (last, self.folder / "made/checkpoint/model.safetensors", *evaluations):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


def children(process: subprocess.Popen[bytes], wanted: Callable[[str], bool]) -> list[psutil.Process]:
    """Return the descendants of `process` for whose command line `wanted` returns True."""
    result = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if wanted(" ".join(child.cmdline())):
                    result.append(child)
    return result


def is_server(command: str) -> bool:
    return "vllm.entrypoints" in command and "components/machine/process.py" not in command


def is_trainer(command: str) -> bool:
    """Return True if the command is the trainer's process of one rank, and not its guard or the parent of several
    ranks."""
    others = ("components/machine/process.py", "armature.components.training.processes")
    return "armature.components.training.service" in command and not any(other in command for other in others)
