"""Seconds per optimizer step, ours and TRL's, on the same tiny model and equal shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rollouts import FAMILY, adapter_of, make_rollouts, model_settings
from benchmarks.table import Row, pair, seconds

ROWS, SIDE, TOKENS, STEPS, ROUNDS = 8, 112, 32, 6, 2
ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-trl/bin/python"


def measure() -> list[Row]:
    make_environment()
    from components.models.tiny import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_tiny_checkpoint(FAMILY, Path(scratch) / "model", 0)
        ready: list[float] = []
        loaded: list[float] = []
        theirs: list[float] = []
        for _ in range(ROUNDS):
            found = _theirs(checkpoint)
            prompt, tokens = found["prompt"][1], found["completion"][1]
            theirs += found["seconds"]
            ours = _ours(checkpoint, Path(scratch), int(prompt), int(tokens))
            ready += ours[0]
            loaded += ours[1]
    note = f"{ROWS} sequences of {prompt + tokens} tokens, {tokens} sampled, one image of {SIDE} x {SIDE} each"
    return [
        _row("an optimizer step on ready tensors", ready, theirs, note),
        _row("the same from a batch table, images processed", loaded, theirs, "TRL's has its tensors ready"),
    ]


def _row(what: str, ours: list[float], theirs: list[float], note: str) -> Row:
    both = pair(ours, theirs)
    return Row(what, both.ours * 1000, both.baseline * 1000, "TRL", "ms", "lower", note, both.spread)


def make_environment() -> None:
    """`.venv-trl`, made when it is first needed."""
    if PYTHON.exists():
        return
    # The installer asks pip for its wheel folders, and the project's environment has no pip.
    python = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([python, "-m", "armature.setup", "trl"], cwd=ROOT, check=True)


def _theirs(checkpoint: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("trl_side.py")
    command = [str(PYTHON), str(script), str(checkpoint), *map(str, (ROWS, SIDE, TOKENS, STEPS))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"TRL's half failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _ours(checkpoint: Path, scratch: Path, prompt: int, tokens: int) -> tuple[list[float], list[float]]:
    import torch

    from components.artifacts.images import ImageStore
    from components.batches.build import build_batch
    from components.batches.settings import BatchSettings
    from components.configuration import load_recipe
    from components.models.load import load_model
    from components.vlm.learner import Learner
    from components.vlm.loader import MicroBatchLoader
    from components.vlm.plan import MicroBatch

    torch.set_num_threads(1)
    images = ImageStore(scratch / "images")
    adapter = adapter_of(checkpoint, images)
    outputs = make_rollouts(adapter, images, groups=1, group_size=ROWS, side=SIDE, tokens=tokens, prompt=prompt)
    settings = BatchSettings.model_validate(
        {
            "advantage": {"name": "group_mean", "scale": "none"},
            "penalty": {"format": 0.0, "inadmissible": 0.0},
            "skip_zero_advantage": False,
            "max_sequence_tokens": 4096,
        }
    )
    samples = list(build_batch(outputs, adapter, settings).samples)
    trainer = load_recipe("train-vlm/colors").sections["trainer"].model_copy(update={"samples_per_update": 0})
    learner = Learner(load_model(checkpoint, model_settings(checkpoint)), trainer, temperature=1.0)  # type: ignore[arg-type]
    loader = MicroBatchLoader(adapter.collator, images, workers=0)

    def step() -> None:
        with loader.batch():
            learner.step(samples, loader)

    whole = MicroBatch(tuple(samples), tuple(range(len(samples)))), adapter.collator.collate(samples, images.open)

    def ready_step() -> None:
        learner.step(samples, lambda plan: iter([whole]))

    ready_step()
    step()
    ready = [seconds(ready_step) for _ in range(STEPS)]
    return ready, [seconds(step) for _ in range(STEPS)]
