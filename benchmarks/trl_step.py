"""CPU seconds per optimizer step, ours and TRL's, on the same tiny model, tokens and advantages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.contracts.batches import Sample
from armature.components.contracts.images import ImageRef
from armature.components.models.load import load_model
from armature.components.vlm.learner import Learner
from armature.components.vlm.loader import MicroBatchLoader
from armature.components.vlm.settings import PPO, TrainerSettings
from benchmarks.rollouts import FAMILY, adapter_of, model_settings
from benchmarks.table import Row, pair

ROWS, SIDE, TOKENS, STEPS, ROUNDS = 8, 112, 32, 6, 4
ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-trl/bin/python"


def measure() -> list[Row]:
    make_environment()
    from armature.components.models.tiny import make_tiny_checkpoint

    taken: dict[str, list[float]] = {"theirs": []}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, images = (
            make_tiny_checkpoint(FAMILY, Path(scratch) / "model", 0),
            ImageStore(Path(scratch) / "images"),
        )
        image = images.put(encode_png(Image.new("RGB", (SIDE, SIDE), (200, 40, 40))))
        norms: dict[str, float] = {}
        for _ in range(ROUNDS):
            result = _theirs(checkpoint, images.path(image), Path(scratch) / "batch.npz")
            taken["theirs"] += result["seconds"]
            norms["TRL"] = result["norm"]
            samples = _samples(Path(scratch) / "batch.npz", image)
            for name, packing in (("padded", False), ("packed", True)):
                ours = _ours(checkpoint, images, samples, packing)
                norms[name] = ours.norm
                for kind, values in (("ready", ours.ready), ("loaded", ours.loaded)):
                    taken.setdefault(f"{kind} {name}", []).extend(values)
    print("  norm of the first gradient:", ", ".join(f"{name} {norm:.6f}" for name, norm in norms.items()))
    length, sampled = len(samples[0].input_ids), int(samples[0].loss_mask.sum())
    shape = f"{ROWS} sequences of {length} tokens, {sampled} sampled, one image of {SIDE} x {SIDE} for all"
    packed = f"trainer.packing: {length - sampled + ROWS * sampled} tokens instead of {ROWS * length}, the image once"
    return [
        _row("an optimizer step on ready tensors", taken["ready padded"], taken["theirs"], shape),
        _row("the same, packed", taken["ready packed"], taken["theirs"], packed),
        _row(
            "from a batch table, images processed", taken["loaded padded"], taken["theirs"], "TRL has its tensors ready"
        ),
        _row("the same, packed", taken["loaded packed"], taken["theirs"], "TRL has its tensors ready"),
    ]


def _row(what: str, ours: list[float], theirs: list[float], note: str) -> Row:
    both = pair(ours, theirs)
    return Row(what, both.ours * 1000, both.baseline * 1000, "TRL", "ms", "lower", note, both.spread)


def make_environment() -> None:
    """Make the virtual environment `.venv-trl`, unless it exists."""
    if PYTHON.exists():
        return
    # The installer asks pip for its wheel folders, and the project's environment has no pip.
    python = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([python, "-m", "armature.setup", "trl"], cwd=ROOT, check=True)


def _theirs(checkpoint: Path, image: Path, batch: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("trl_side.py")
    command = [str(PYTHON), str(script), str(checkpoint), str(image), *map(str, (ROWS, TOKENS, STEPS, batch))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"TRL's half failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _samples(batch: Path, image: ImageRef) -> list[Sample]:
    """Return the batch that TRL trained on, as our samples."""
    result, samples = np.load(batch), []
    for row, completion in enumerate(result["completion_ids"]):
        prompt = result["prompt_ids"][row][result["prompt_mask"][row] == 1]
        mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
        samples.append(
            Sample(
                sample_id=f"{row}",
                group_id="0",
                trajectory_id=f"{row}",
                input_ids=np.concatenate([prompt, completion]).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=np.zeros(len(mask), np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, result["advantages"][row], 0).astype(np.float32),
                reward=0.0,
                images=(image,),
            )
        )
    return samples


@dataclass(frozen=True)
class Ours:
    """Our results. `ready` has the CPU seconds per step if the tensors exist already, and `loaded` the CPU seconds
    including the making of tensors. `norm` is the norm of the first gradient."""

    ready: list[float]
    loaded: list[float]
    norm: float


def _ours(checkpoint: Path, images: ImageStore, samples: list[Sample], packing: bool) -> Ours:
    torch.set_num_threads(1)
    trainer = TrainerSettings(
        objective=PPO(name="ppo"),  # TRL's default: clipped at 0.2, the mean over tokens
        aggregation="token",
        learning_rate=1e-5,
        max_steps=10 * STEPS,
        packing=packing,
    )
    learner = Learner(load_model(checkpoint, model_settings(checkpoint)), trainer, temperature=1.0)
    loader = MicroBatchLoader(adapter_of(checkpoint, images).collator, images, workers=0)
    with loader.batch():
        scores = learner.score(samples, loader)
        ours = [replace(one, behavior_logprobs=values) for one, values in zip(samples, scores, strict=True)]
        whole = list(loader(learner.plan(ours, range(len(ours)))))

    def step() -> None:
        with loader.batch():
            learner.step(ours, loader)

    def ready_step() -> dict[str, float]:
        return learner.step(ours, lambda plan: iter(whole))

    norm = ready_step()["grad_norm"]
    step()
    ready = [_seconds(ready_step) for _ in range(STEPS)]
    return Ours(ready, [_seconds(step) for _ in range(STEPS)], norm)


def _seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds that `work` takes. Both sides compute in one thread, and other processes of the machine do
    not count."""
    began = time.process_time()
    work()
    return time.process_time() - began
