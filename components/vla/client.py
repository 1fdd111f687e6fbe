"""The client of a trainer of policies. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from armature.components.training.client import FLOATS, ServiceClient
from armature.components.vla.settings import TrainVLASettings


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
