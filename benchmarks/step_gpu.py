"""An update of a vision-language model on a GPU, ours and TRL's, on the same tokens and advantages.

TRL runs in `.venv-trl`, or in the Python that ARMATURE_TRL_PYTHON names. It has its best settings: workers that load,
Liger's layers, and the faster of FlashAttention 4, for which requirements/cuda.txt has to be installed there, and 2.
The latter is PyTorch's own kernel under flash-attn's names, in `flash_attention/`: flash-attn has no wheel for most
versions of torch. Both sides keep activations, and both recompute them (gradient checkpointing): a row has one or the
other. `ROUNDS` times, one side after the other. The cases are those of `benchmarks.step_case`; in U nothing is shared.

Usage: python -m benchmarks.step_gpu WAY..., ways of ours alone as `benchmarks.step_ours` has them, or `fits CASE...`,
the fastest ways of both sides within `FITTING_GIB`; on a CPU of a small model.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from armature.components.machine.resources import VISIBLE, visible_devices
from benchmarks.step_case import LIMIT, NO_MEMORY, PEAK_FLOPS, WORK, Case, need_gpu, needed_flops

HERE = Path(__file__).parent
STEPS, ROUNDS = 3, 3
OURS = tuple(
    f"{case},packing,bf16,compile{words}"
    for words, cases in {
        ",keep": ("A,24000", "B,18000", "C,20000", "Q,24000", "U,21000"),
        "": ("A,24000", "B,70000", "C,40000", "Q,24000", "U,42000"),
    }.items()
    for case in cases
)
"""Our variants. Their sizes are chosen for the 141 GB of an H200."""
TRL = tuple(
    f"bf16,1,{recompute},{rows},{version}"
    for recompute, cases in (
        (0, ("A,16", "B,16", "C,16", "Q,16", "U,16")),
        (1, ("A,16", "B,8", "C,8", "Q,8", "U,8")),
    )
    for version in (4, 2)
    for rows in cases
)
"""Variants of TRL. Their micro-batches are the fastest on an H200: larger ones do not fit in memory or are not
faster."""

FITTING_GIB = 76
"""Memory that PyTorch may allocate on a GPU of 80 GB."""
OURS_FITTING = {
    "A": ("24000", "24000,0.5", "9600,8bit,0", "24000,8bit,0.1"),
    "B": ("70000,0.9", "9000,0.25", "9000,8bit,0", "18000,8bit,0.15"),
    "C": ("40000,0.8", "8000,0.25", "14000,8bit,0", "20000,8bit,0.25"),
    "Q": ("24000,0.75", "7500,8bit,0", "11000,8bit,0.1", "24000,8bit,0.35"),
    "U": ("14000", "7500,8bit,0", "10500,8bit,0.3", "21000,8bit,0.7"),
}
"""Variants of ours that should need at most `FITTING_GIB`, by case: tokens of a micro-batch, moments in 8 bits or fp32,
and the share of layers that recompute activations (all without a number). In a step of one micro-batch gradients take
the place of activations, so more layers keep them."""
TRL_FITTING = "4", "8"
"""Rows of a micro-batch of TRL, which keeps activations."""


def fits(cases: Sequence[str], steps: int = STEPS + 1, *, small: bool) -> list[dict[str, Any]]:
    """Measure the variants of both sides within `FITTING_GIB`, and return a row for each case with the fastest ones."""
    compiled = "" if small else ",compile"
    ours = [f"{case},{way},packing,bf16{compiled}" for case in cases for way in OURS_FITTING[case]]
    trl = [f"bf16,1,0,{case},{rows},4" for case in cases for rows in TRL_FITTING]
    taken = sides(ours, trl, steps, small=small, limit=FITTING_GIB)
    rows = [fitting_row(case, taken) for case in cases]
    for row in rows:
        print(f"  {row}", flush=True)
    return rows


def fitting_row(case: str, taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest variant of each side that did not run out of memory, and the ratio of their medians."""
    row: dict[str, Any] = {"case": case}
    for side, prefix in (("ours", ""), ("trl", "trl_")):
        fitting = [one for one in taken if one["side"] == side and case in one["way"].split(",") and "seconds" in one]
        for one in sorted(fitting, key=lambda one: statistics.median(one["seconds"]))[:1]:
            ms = [1e3 * second for second in one["seconds"]]
            best = {"way": one["way"], "ms": statistics.median(ms), "range": [min(ms), max(ms)]}
            best |= {name: one[name] for name in ("peak_gib", "norm", "computed")}
            row |= {prefix + name: value for name, value in best.items()}
    if "ms" in row and "trl_ms" in row:
        row["ratio"] = row["ms"] / row["trl_ms"]
    return row


def record() -> None:
    """Measure everything and write the results to the benchmark page."""
    from benchmarks.table import write

    need_gpu("python -m benchmarks.step_gpu WAY...")
    began, taken = time.perf_counter(), []
    for _ in range(ROUNDS):
        taken += sides(OURS, TRL, STEPS)
    rows = rows_of(taken)
    for row in rows:
        print(f"  {row}", flush=True)
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    steps = f"{STEPS} updates of each side in each of {ROUNDS} rounds"
    note = f"All rounds took {(time.perf_counter() - began) / 60:.0f} minutes."
    write("step-gpu", device | {"rows": rows, "steps": steps, "note": note})


def sides(
    ours: Sequence[str], trl: Sequence[str], steps: int, *, small: bool = False, limit: float | None = None
) -> list[dict[str, Any]]:
    """Measure the variants of both sides, each side in a process of its own, and return the results.

    Args:
        limit: the GiB of GPU memory that PyTorch may allocate. A way that needs more is a result too.

    Raises:
        SystemExit: a way failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        processors, out = Path(scratch) / "processors", Path(scratch) / "out"
        named = [way.split(",")[0] for way in ours] + [way.split(",")[3] for way in trl]
        for family in {WORK[case].family for case in named}:
            make_processor(family, processors / family, small=small)
        shared = [str(processors), str(out), str(steps), "1" if small else "0"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "8"}
        environment |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"CUDA_SCALE_LAUNCH_QUEUES": "4x"}  # as our trainer sets it
        if limit is not None:
            environment |= {LIMIT: str(limit)}
        if torch.cuda.is_available():
            environment |= {VISIBLE: visible_devices([0])}  # TRL refuses several
        if trl:
            python = os.environ.get("ARMATURE_TRL_PYTHON", str(HERE.parent / ".venv-trl/bin/python"))
            paths = (
                [str(HERE / "flash_attention"), os.environ.get("PYTHONPATH", "")] if torch.cuda.is_available() else []
            )
            theirs = environment | {"PYTHONPATH": os.pathsep.join(paths)} if paths else environment
            subprocess.run([python, str(HERE / "step_trl.py"), *shared, *trl], env=theirs, check=True)
        if ours:
            command = [sys.executable, "-m", "benchmarks.step_ours", *shared, *ours]
            subprocess.run(command, env=environment, cwd=HERE.parent, check=True)
        result = [json.loads(line) for line in out.read_text().splitlines()]
    expected = "" if limit is None else NO_MEMORY
    if failed := [one for one in result if one.get("failed", expected) != expected]:
        raise SystemExit("\n".join(f"{one['side']} {one['way']}: {one['failed']}" for one in failed))
    return result


def make_processor(family: str, folder: Path, *, small: bool) -> Path:
    """Write a checkpoint without weights, because only its processor is needed."""
    from armature.components.models.tiny.build import SMALL, make_tiny_checkpoint

    settings = SMALL.model_copy(update={"image_side": 112 if small else 448, "max_positions": 32_768})
    make_tiny_checkpoint(family, folder, 0, settings)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def rows_of(taken: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each of our ways, compared with the fastest way of TRL. Both have the same case and treat
    activations alike: both keep them, or both recompute them. The spread is over all steps of both."""
    rows = []
    for way in dict.fromkeys(one["way"] for one in taken if one["side"] == "ours"):
        case, saved = Case(Path(), way.split(",")[0]), "keep" in way.split(",")
        ours = [one for one in taken if one["way"] == way]
        named: dict[str, list[dict[str, Any]]] = {}
        for one in taken:
            if one["side"] == "trl" and one["way"].split(",")[2:4] == ["0" if saved else "1", case.name]:
                named.setdefault(one["way"], []).append(one)
        medians = {other: statistics.median(_seconds(result)) for other, result in named.items()}
        fastest = min(medians, key=medians.__getitem__)
        theirs, seconds, baseline = named[fastest], _seconds(ours), _seconds(named[fastest])
        median = statistics.median(seconds)
        rows.append(
            {
                "case": case.name,
                "kept": saved,
                "sampled": int(case.lengths.sum()),
                "computed": ours[0]["computed"],
                "trl_computed": theirs[0]["computed"],
                "ms": median * 1e3,
                "range": [1e3 * min(seconds), 1e3 * max(seconds)],
                "trl_ms": medians[fastest] * 1e3,
                "trl_range": [1e3 * min(baseline), 1e3 * max(baseline)],
                "trl_rows": int(fastest.split(",")[4]),
                "trl_flash": fastest.split(",")[5],
                "ratio": median / medians[fastest],
                "machines": 1,
                "peak_gib": max(one["peak_gib"] for one in ours),
                "trl_peak_gib": max(one["peak_gib"] for one in theirs),
                "norm": ours[0]["norm"],
                "trl_norm": theirs[0]["norm"],
                "mfu": needed_flops(case) / median / PEAK_FLOPS,
            }
        )
    return rows


def _seconds(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [second for one in rows for second in one["seconds"]]


if __name__ == "__main__":
    if sys.argv[1:2] == ["fits"]:
        fits(sys.argv[2:] or list(OURS_FITTING), small=not torch.cuda.is_available())
    else:
        sides(sys.argv[1:], (), STEPS, small=not torch.cuda.is_available())
