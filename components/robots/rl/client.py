"""The client of a trainer of policies by rewards. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from armature.components.robots.rl.settings import RobotRLTrainerSettings, RobotRolloutSettings
from armature.components.training.client import ServiceClient

SCORES = TypeAdapter(list[float])


class RobotRLTraining(BaseModel):
    """What is trained, and on which rollouts: `policy` is the folder of an artifact, `images` the root of the store of
    images.

    fingerprint: names the run, and no other resumes from it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    WORKER: ClassVar[str] = "policy-rl"

    trainer: RobotRLTrainerSettings
    rollouts: RobotRolloutSettings
    policy: Path
    images: Path
    fingerprint: str

    @property
    def seed(self) -> int:
        return self.trainer.seed


class RobotRLTrainerClient(ServiceClient):
    """A trainer of policies by rewards: `training` is a `RobotRLTraining`."""

    def step(self, step: int, batch: Path) -> dict[str, float]:
        """Train on the batch in folder `batch` as step `step` = 1, 2, ...; the metrics of the step. Applied once."""
        return self._train(step, batch=str(batch.resolve()))

    def score(self, batch: Path) -> list[float]:
        """Of each answer of the batch the log-prob of all that counts."""
        return self._ask("score", self.machine.limits.train_timeout, SCORES, batch=str(batch.resolve()))
