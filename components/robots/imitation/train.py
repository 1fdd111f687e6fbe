"""The training loop of a policy on a trainer service, which is restarted if it dies. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from armature.components.artifacts.json_lines import History
from armature.components.contracts.stages import Events
from armature.components.robots.imitation.settings import TrainVLASettings, VLATrainerSettings
from armature.components.training.client import FLOATS, ServiceClient, run_steps


class PolicyTraining(BaseModel):
    """Settings and inputs of a training.

    policy, dataset, statistics: folders of the input artifacts. fingerprint: only a training with the same fingerprint
    resumes from its checkpoints.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    WORKER: ClassVar[str] = "policy"

    settings: TrainVLASettings
    policy: Path
    dataset: Path
    statistics: Path
    fingerprint: str

    @property
    def seed(self) -> int:
        """Seed of the training's random numbers, from the training settings."""
        return self.settings.training.seed


class PolicyTrainerClient(ServiceClient):
    """Client of a trainer service that trains a policy. The service's setting `training` is a `PolicyTraining`."""

    def step(self, step: int) -> dict[str, float]:
        """Make update `step` = 1, 2, ... on data that the service loads; return its metrics.

        A step that is sent twice is applied once.
        """
        return self._train(step)

    def measure(self) -> dict[str, float]:
        """Return losses and action errors on held-out frames, or {} without such frames.

        If weights are averaged (`ema_decay`), the averages are measured.
        """
        return self._ask("measure", self.machine.limits.train_timeout, FLOATS)


SHOWN = {
    "loss": "loss",
    "loss/flow": "flow",
    "loss/cross_entropy": "ce",
    "learning_rate/action_expert": "lr",
    "grad_norm": "grad",
    "samples_per_second": "samples/s",
    "memory/peak_gib": "GiB",
    "heldout/action_error": "error",
}
"""Keys of the history to show beside the progress bar, and their short names there."""


def train(
    trainer: PolicyTrainerClient, settings: VLATrainerSettings, history: History, events: Events, out: Path
) -> None:
    """Train to `max_steps`, from the newest checkpoint if there is one, and write the policy to the folder `out`.

    The history's step 0 is measured before any training. A step is recorded before it is saved, so the history has
    every step that a checkpoint contains.

    Raises:
        TrainerError: the service refuses the training, or keeps dying.
    """
    last, heldout = settings.max_steps, settings.heldout
    for row in history.read():  # steps of an earlier start, so that the curves show the whole training
        events.metrics({name: value for name, value in row.items() if name != "step"}, int(row["step"]))

    def record(step: int, report: dict[str, float]) -> None:
        history.append(step, report)
        events.metrics(report, step)
        events.progress("Training", step, last, **{short: report[key] for key, short in SHOWN.items() if key in report})

    def begin() -> None:
        if report := trainer.measure():
            record(0, report)

    def one_step(step: int) -> None:
        report = trainer.step(step)
        if heldout is not None and (step % heldout.every == 0 or step == last):
            report |= trainer.measure()
        record(step, report)
        if step % settings.save_every == 0 and step < last:  # the last weights are published
            trainer.save()

    run_steps(trainer, last, begin, one_step, out, events)
