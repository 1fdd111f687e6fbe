"""Short runs of train-vlm/colors, as `armature drill` starts them."""

from __future__ import annotations

from pathlib import Path

import psutil

from armature.components.configuration import load_recipe
from armature.drill.faults import signal_processes
from armature.drill.runs import DrilledRun, make_inputs, short_overrides

RECIPE, STEPS = "train-vlm/colors", 10


def make_colors_inputs(store: Path) -> dict[str, Path]:
    return make_inputs(load_recipe(RECIPE, [*short_overrides(RECIPE), f'machine.store="{store}"']))


def colors_run(folder: Path, inputs: dict[str, Path], *machine: str) -> DrilledRun:
    """Return a run in this folder. `machine` are settings of the section `machine`, written "key=value"."""
    return DrilledRun(folder, RECIPE, (*short_overrides(RECIPE), *(f"machine.{fact}" for fact in machine)), inputs)


def processes_of(mark: str, kind: str) -> list[psutil.Process]:
    """Return the processes of the run with this mark that are of this kind."""
    return [psutil.Process(pid) for _, pid in sorted(signal_processes(mark, kind))]
