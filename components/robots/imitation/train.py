"""The training loop of a policy, on a trainer service that may die and come back."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from armature.components.artifacts.json_lines import History
from armature.components.contracts.stages import Events
from armature.components.robots.imitation.settings import TrainVLASettings, VLATrainerSettings
from armature.components.training.client import FLOATS, ServiceClient, run_steps

# The client of a trainer of policies. Torch-free.


class PolicyTraining(BaseModel):
    """What is trained: the inputs are folders of artifacts; the fingerprint names it, and no other resumes from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    WORKER: ClassVar[str] = "policy"

    settings: TrainVLASettings
    policy: Path
    dataset: Path
    statistics: Path
    fingerprint: str

    @property
    def seed(self) -> int:
        return self.settings.training.seed


class PolicyTrainerClient(ServiceClient):
    """A trainer of policies: `training` is a `PolicyTraining`."""

    def step(self, step: int) -> dict[str, float]:
        """Make update `step` = 1, 2, ... on the data that is its own; its metrics. Applied once."""
        return self._train(step)

    def measure(self) -> dict[str, float]:
        """Losses and action errors on held-out frames, of the averaged weights if there are; {} without such frames."""
        return self._ask("measure", self.machine.train_timeout, FLOATS)


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
"""Keys of the history, and their names beside the progress bar."""


def train(
    trainer: PolicyTrainerClient, settings: VLATrainerSettings, history: History, events: Events, out: Path
) -> None:
    """Train to `max_steps`, from the newest checkpoint if there is one, and write the policy to the folder `out`.

    The history's step 0 is before any training. A step is recorded before it is saved, so the history never lacks one
    that the weights contain.

    Raises:
        TrainerError: the service refuses, or dies again and again.
    """
    last, held = settings.max_steps, settings.heldout
    for row in history.read():  # of an earlier start: curves begin where the training did
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
        if held is not None and (step % held.every == 0 or step == last):
            report |= trainer.measure()
        record(step, report)
        if step % settings.save_every == 0 or step == last:
            trainer.save()

    run_steps(trainer, last, begin, one_step, out, events)
