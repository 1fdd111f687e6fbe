"""An environment of your own on a page, and GRPO on it: is an image light or dark?

An environment lists tasks and plays an episode of a task: `reset` returns the first observation, `step` takes an answer
and returns its reward, part by part. An episode has one turn here. An outcome with another observation would continue
it. Two cores and no GPU are enough: `python examples/own_environment.py` takes a minute.

Recipes find an environment by its name if the package that holds it declares it in its pyproject.toml:

    [project.entry-points."armature.environments"]
    shades = "own_environment:Shades"

Then `armature run train-vlm/colors --set environment.name=shades --set evaluation.kind_field=shade` trains on it as
well. This script leaves out several turns, invalid actions, demonstrations and state keys for GiGPO, which
docs/extending.md shows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import Field

from armature import (
    GeneratedEnvironment,
    MultimodalGRPOTrainer,
    MultimodalRLConfig,
    Observation,
    Outcome,
    Settings,
    Task,
    encode_png,
    make_tiny_checkpoint,
    vllm_server,
)

QUESTION = "Is this light or dark?"
LEVELS = {"light": 160, "dark": 96}


class ShadesSettings(Settings):
    noise: float = Field(16.0, ge=0)
    """Standard deviation of a pixel's noise, of 255 levels."""


class Shades(GeneratedEnvironment[ShadesSettings]):
    """Each answer comes equally often, so a guess is right one time in two."""

    name = "shades"
    Settings = ShadesSettings
    max_turns = 1
    reward_weights: Mapping[str, float] = {"correct": 1.0}

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return {"shade": list(LEVELS)[index % 2], "seed": seed}

    def episode(self, task: Task) -> ShadesEpisode:
        return ShadesEpisode(task.payload["shade"], task.payload["seed"], self.settings.noise)


class ShadesEpisode:
    def __init__(self, shade: str, seed: int, noise: float) -> None:
        self.shade = shade
        pixels = np.random.default_rng(seed).normal(LEVELS[shade], noise, (56, 56, 3))
        self.image = encode_png(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))

    async def reset(self) -> Observation:
        return Observation((self.image, QUESTION))

    async def step(self, action: str) -> Outcome:
        return Outcome(None, {"correct": float(action.strip() == self.shade)})  # no observation: the episode is done

    async def close(self) -> None:
        pass


def train(work: Path, steps: int) -> dict[str, float]:
    """Return the metrics of the last step of a tiny model that begins by answering light or dark at random."""
    conversation = {"user": [f"{{image}}{QUESTION}"], "assistant": ["{answer}"]}
    settings = {
        "initializer_range": 0.1,
        "vision_initializer_range": 0.1,
        "format": {"transcripts": [conversation], "answers": list(LEVELS)},
    }
    model = make_tiny_checkpoint("qwen2-vl", work / "model", seed=3, settings=settings)

    # The trainer joins a vLLM server. To use one that is up, give its port below and its key as VLLM_API_KEY.
    with vllm_server(model, work / "servers", max_model_len=512, dtype="float32") as server:
        config = MultimodalRLConfig(
            output_dir=work,
            max_steps=steps,
            rollouts_per_step=128,
            batch_size=128,
            micro_batch_size=128,
            max_tokens=4,
            learning_rate=1e-3,
            log_every_steps=1,
            vllm_server_port=server.port,
        )
        trainer = MultimodalGRPOTrainer(model, config=config)
        trainer.set_environment(Shades(ShadesSettings(), train_tasks=1024, heldout_tasks=1, seed=0, processes=1))
        return trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="own-environment-") as folder:
        print(f"reward in the last step {train(Path(folder), steps=8)['reward']:.3f}; a guess earns 0.5")
