"""Training on samples for several epochs, on a trainer service that may die and be restarted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from armature.components.artifacts.json_lines import History
from armature.components.contracts.batches import Sample
from armature.components.contracts.stages import TRAINING, Events
from armature.components.machine.process import Scratch
from armature.components.rollouts.batches.table import write_batch
from armature.components.training.client import run_steps
from armature.components.vlm.client import OUT_OF_MEMORY, RECOMPUTES, TrainerClient

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
    OUT_OF_MEMORY: OUT_OF_MEMORY,
}
"""Metrics of the trainer that are meaningful without a sampler, and their names in the history."""


@dataclass(frozen=True)
class EpochSampler:
    """Chooses the samples of each step. Every epoch uses all samples, in a new random order.

    With `together` = 2, two neighboring samples are a pair: steps have so many pairs, and the order is theirs.
    """

    samples: Sequence[Sample]
    epochs: int
    samples_per_step: int
    seed: int
    together: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch."""
        return -(-len(self.samples) // (self.samples_per_step * self.together))

    @property
    def steps(self) -> int:
        """Number of steps of all epochs."""
        return self.epochs * self.steps_per_epoch

    def of(self, step: int) -> list[Sample]:
        """Return the samples of `step`, from 1 to `steps`. The last step of an epoch has the samples that remain."""
        epoch, part = divmod(step - 1, self.steps_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.samples) // self.together)
        chosen = order[part * self.samples_per_step :][: self.samples_per_step]
        return [self.samples[unit * self.together + row] for unit in chosen for row in range(self.together)]

    def ends_epoch(self, step: int) -> bool:
        """Tell if `step` is the last step of an epoch."""
        return step % self.steps_per_epoch == 0


class TrainingLoss(Protocol):
    """A loss and its metrics. Methods may write the samples that the trainer reads to the folder `batch`."""

    SHOWN: ClassVar[Mapping[str, str]]
    """Metrics beside the loss in the line of a step: their short names there, and their names in the history."""

    def begin(self, batch: Path) -> None:
        """Prepare what needs the initial weights. It is called before step 1 in a run that does not resume."""
        ...

    def step(self, step: int, samples: Sequence[Sample], batch: Path) -> dict[str, float]:
        """Train on the samples of `step`, and return the step's metrics."""
        ...

    def evaluate(self, batch: Path) -> dict[str, float]:
        """Return metrics of the held-out samples; empty without any."""
        ...


class AnswerLoss:
    """The cross-entropy of the answers' tokens; see `TrainingLoss`."""

    SHOWN: ClassVar[Mapping[str, str]] = {"p": "probability", "token_accuracy": "heldout/token_accuracy"}

    def __init__(self, trainer: TrainerClient, heldout: Sequence[Sample]) -> None:
        self._trainer, self._heldout = trainer, heldout

    def begin(self, batch: Path) -> None:
        """Do nothing: only answers and weights determine the loss."""

    def step(self, step: int, samples: Sequence[Sample], batch: Path) -> dict[str, float]:
        write_batch(batch, samples)
        report = self._trainer.step(step, batch)
        return {name: report[key] for key, name in METRICS.items() if key in report}

    def evaluate(self, batch: Path) -> dict[str, float]:
        if not self._heldout:
            return {}
        write_batch(batch, self._heldout)
        return self._trainer.evaluate(batch)


def fit(
    trainer: TrainerClient,
    loss: TrainingLoss,
    plan: EpochSampler,
    save_every: int,
    history: History,
    events: Events,
    out: Path,
) -> None:
    """Run the training steps of `plan` that the newest checkpoint lacks, and publish the final weights to the folder
    `out`.

    Step 0 of the history has the metrics of held-out samples before any training. A step is recorded before it is
    saved, so the history never lacks a step that the weights contain.

    Raises:
        TrainerError: the service refuses a command, or dies too often; see `run_steps`.
    """
    with Scratch() as folder:
        batch = Path(folder)

        def evaluated() -> dict[str, float]:
            return {f"heldout/{name}": value for name, value in loss.evaluate(batch).items()}

        def one_step(step: int) -> None:
            metrics = loss.step(step, plan.of(step), batch)
            if OUT_OF_MEMORY in metrics:
                events.message(f"step {step}: {RECOMPUTES}")
            if plan.ends_epoch(step):
                metrics |= evaluated()
            history.append(step, metrics)
            if step % save_every == 0 and step < plan.steps:  # the last weights are published
                trainer.save()
            events.metrics(metrics, step)
            shown = {short: metrics[name] for short, name in {"loss": "loss", **loss.SHOWN}.items() if name in metrics}
            events.progress(TRAINING, step, plan.steps, **shown)

        def begin() -> None:
            loss.begin(batch)
            history.append(0, evaluated())

        run_steps(trainer, plan.steps, begin, one_step, out, events)
