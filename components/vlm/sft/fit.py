"""Training on samples for several epochs, on a trainer service that may die and be restarted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from armature.components.artifacts.json_lines import History
from armature.components.contracts.batches import Sample
from armature.components.contracts.stages import TRAINING, Events
from armature.components.machine.process import Scratch
from armature.components.rollouts.batches.table import write_batch
from armature.components.training.client import run_steps
from armature.components.vlm.client import TrainerClient

METRICS = {
    "loss": "loss",
    "importance_ratio": "probability",  # the ratio to the probability of given tokens, which is 1
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "updates_skipped": "updates_skipped",
    "learning_rate": "learning_rate",
    "tokens/trained": "tokens/trained",
    "tokens_per_second": "tokens_per_second",
    "timing/train_s": "timing/train",
    "memory/peak_gib": "memory/peak_gib",
}
"""Metrics of the trainer that are meaningful without a sampler, and their names in the history."""


@dataclass(frozen=True)
class EpochSampler:
    """Chooses the samples of each step. Every epoch uses all samples, in a new random order."""

    samples: Sequence[Sample]
    epochs: int
    samples_per_step: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch."""
        return -(-len(self.samples) // self.samples_per_step)

    @property
    def steps(self) -> int:
        """Number of steps of all epochs."""
        return self.epochs * self.steps_per_epoch

    def of(self, step: int) -> list[Sample]:
        """Return the samples of `step`, from 1 to `steps`. The last step of an epoch has the samples that remain."""
        epoch, part = divmod(step - 1, self.steps_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.samples))
        return [self.samples[row] for row in order[part * self.samples_per_step :][: self.samples_per_step]]

    def ends_epoch(self, step: int) -> bool:
        """Tell if `step` is the last step of an epoch."""
        return step % self.steps_per_epoch == 0


def fit(
    trainer: TrainerClient,
    plan: EpochSampler,
    heldout: Sequence[Sample],
    save_every: int,
    history: History,
    events: Events,
    out: Path,
) -> None:
    """Run the training steps of `plan` that the newest checkpoint lacks, and publish the final weights to the folder
    `out`.

    Step 0 of the history has the held-out loss and token accuracy before any training. A step is recorded before it is
    saved, so the history never lacks a step that the weights contain.

    Raises:
        TrainerError: the service refuses a command, or dies too often; see `run_steps`.
    """
    with Scratch() as folder:
        batch = Path(folder)

        def evaluated() -> dict[str, float]:
            if not heldout:
                return {}
            write_batch(batch, heldout)
            return {f"heldout/{name}": value for name, value in trainer.evaluate(batch).items()}

        def one_step(step: int) -> None:
            write_batch(batch, plan.of(step))
            report = trainer.step(step, batch)
            metrics = {name: report[key] for key, name in METRICS.items() if key in report}
            if plan.ends_epoch(step):
                metrics |= evaluated()
            history.append(step, metrics)
            if step % save_every == 0 or step == plan.steps:
                trainer.save()
            events.metrics(metrics, step)
            shown = {name: metrics[f"heldout/{name}"] for name in ("token_accuracy",) if f"heldout/{name}" in metrics}
            events.progress(TRAINING, step, plan.steps, loss=metrics["loss"], p=metrics["probability"], **shown)

        def begin() -> None:
            history.append(0, evaluated())

        run_steps(trainer, plan.steps, begin, one_step, out, events)
