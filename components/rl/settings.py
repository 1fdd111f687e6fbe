"""What decides the outcome of an RL run."""

from __future__ import annotations

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from components.batches.settings import BatchSettings
from components.contracts.settings import Settings
from components.environments.settings import EnvironmentSettings
from components.inference.settings import ServerSettings
from components.models.settings import ModelSettings
from components.rollouts.settings import RolloutSettings
from components.training.settings import TrainerSettings


class PreflightSettings(Settings):
    """What trainer and server must agree on before the first step."""

    model_config = ConfigDict(title="Pre-flight")

    groups: PositiveInt = Field(description="Groups of rollouts that are scored by both sides.")
    max_mismatch_kl: PositiveFloat = Field(description="Refuse to train above this k3 KL(server || trainer).")


class TrainVLMSettings(Settings):
    """The sections of a train-vlm recipe that the trained weights depend on."""

    model: ModelSettings
    environment: EnvironmentSettings
    inference: ServerSettings
    rollouts: RolloutSettings
    batches: BatchSettings
    trainer: TrainerSettings
    preflight: PreflightSettings
