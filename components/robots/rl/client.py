"""Client of the trainer of robot policies by rewards. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from armature.components.robots.rl.settings import RobotRLTrainerSettings, RobotRolloutSettings
from armature.components.training.client import ServiceClient

SCORES = TypeAdapter(list[float])


class RobotRLTraining(BaseModel):
    """Start message of a trainer process.

    policy: folder of the policy artifact. images: root folder of the image store. fingerprint: identifies the run; a
    checkpoint of another run is refused.
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
    """Client of a trainer process that is started with a `RobotRLTraining`."""

    def step(self, step: int, batch: Path) -> dict[str, float]:
        """Train on the batch in folder `batch` as step `step` = 1, 2, ... and return the step's metrics.

        Repeating a step that has been applied does not train again.
        """
        return self._train(step, batch=str(batch.resolve()))

    def score(self, batch: Path) -> list[float]:
        """Return the log-prob of each chunk of the batch: the sum over its counted numbers or tokens."""
        return self._ask("score", self.machine.limits.train_timeout, SCORES, batch=str(batch.resolve()))
