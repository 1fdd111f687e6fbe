"""A store with a robot policy's training: two steps of episodes, and evaluations before and after with videos."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.json_lines import History
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.stages import STARTED
from armature.components.robots.datasets.lerobot.video import VideoWriter
from armature.components.robots.evaluation.results import LiberoResult, video_path, write_results
from armature.components.robots.evaluation.videos import ENCODING
from armature.components.robots.rl.table import ActionChunk, with_advantage, write_batch, write_rollouts
from tests.robots.rl.test_batch import answers

RUN, BEFORE, AFTER = "a" * 20, "b" * 20, "c" * 20
EVALUATION = {"evaluation": {"suites": ["libero_spatial"]}, "simulator": {}}


def begin(root: Path, stage: str, run: str, settings: dict[str, Any], policy: Path) -> Path:
    workspace = root / "workspaces" / f"{stage}-{run}"
    workspace.mkdir(parents=True)
    (workspace / STARTED).write_text(json.dumps({"settings": settings, "inputs": {"policy": str(policy)}}))
    return workspace


def write(root: Path, kind: str, name: str, fill: Any) -> None:
    def whole(folder: Path) -> None:
        fill(folder)
        write_manifest(folder, kind=kind, kind_version=1, rows={}, drops={}, inputs={}, settings=EVALUATION)

    ArtifactStore(root).write(kind, name, whole)


def make_step(root: Path, step: int, *episodes: tuple[int, float]) -> list[ActionChunk]:
    """Write a training step with one group of episodes (see `answers`), and return its action chunks.

    Predicted values fall along an episode, and log-probs rise from step to step.
    """
    image = ImageStore(root / "images").put(encode_png(Image.new("RGB", (24, 24), (220, 40, 40))))
    rows = [
        replace(each, images=(image,), value=0.5 - each.chunk / 8, logprobs=each.logprobs + step)
        for each in answers(f"{step:05d}-000000", *episodes)
    ]
    write(root, "robot-rollouts", f"{RUN}-{step:05d}", lambda folder: write_rollouts(folder, rows))
    samples = [with_advantage(each, each.chunk + 0.25) for each in rows]
    write(root, "robot-batches", f"{RUN}-{step:05d}", lambda folder: write_batch(folder, samples))
    success = sum(reward for _, reward in episodes) / len(episodes)
    History(root / f"workspaces/train-vla-rl-{RUN}/history.jsonl").append(step, {"reward": success, "success": success})
    return rows


def make_evaluation(root: Path, run: str, policy: Path, *solved: bool, filmed: int) -> None:
    """Write an evaluation with one episode of the same task for each value in `solved`. The first `filmed` episodes
    have videos of 8 frames."""
    begin(root, "evaluate-libero", run, EVALUATION, policy)
    results = [
        LiberoResult("libero_spatial", 0, "reach <b>it</b>", k, k, 1000 + k, end, 8, (0.5,) * 56, None)
        for k, end in enumerate(solved)
    ]

    def fill(folder: Path) -> None:
        write_results(folder, results)
        for result in results[:filmed]:
            writer = VideoWriter(folder / video_path(result.key), 20, 32, 16, ENCODING)
            writer.append([np.full((16, 32, 3), 30 * frame, np.uint8) for frame in range(8)])
            writer.close()

    write(root, "evaluate-libero", run, fill)


def make_training(root: Path) -> None:
    begin(root, "train-vla-rl", RUN, {"rollouts": {"suite": "libero_spatial"}, "trainer": {"max_steps": 3}}, root / "p")
    make_step(root, 1, (2, 1.0), (3, 0.0), (3, 0.0))
    make_step(root, 2, (1, 1.0), (2, 1.0))
    make_evaluation(root, BEFORE, root / "p", False, True, False, filmed=2)
    make_evaluation(root, AFTER, root / "train-vla-rl" / RUN, True, True, True, filmed=3)
