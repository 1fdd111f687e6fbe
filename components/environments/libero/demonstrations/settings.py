"""What is demonstrated, and how it is recorded."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from armature.components.contracts.settings import Settings
from armature.components.datasets.lerobot.settings import LayoutSettings
from armature.components.environments.libero.settings import SimulatorSettings, Suite


class DemonstrationSettings(Settings):
    """Episodes of every task begin at the suite's stored initial states, one after another."""

    model_config = ConfigDict(title="Demonstrations")

    suite: Suite = Field(description="The suite whose tasks are demonstrated.")
    tasks: tuple[NonNegativeInt, ...] = Field(
        (), description="Numbers of tasks in the suite; empty: all that the scripted policy can do."
    )
    episodes_per_task: PositiveInt = Field(
        50, description="Episodes of each task; more than the 50 stored states begin again at the first."
    )
    first_initial_state: NonNegativeInt = Field(
        0, description="Initial state of the first episode; keep others for evaluation."
    )
    seed: NonNegativeInt = Field(0, description="Seed of the furniture's places and of the noise.")
    noise: NonNegativeFloat = Field(
        0.1,
        description="Standard deviation of what disturbs its motions (of 1, the largest). What is recorded "
        "is what the scripted policy wanted, so that a policy learns to recover; 0 disturbs nothing.",
    )
    storage: Literal["image", "video"] = Field("video", description="Images as PNG in the data files, or as videos.")


class DemonstrationsStageSettings(Settings):
    """The sections that the dataset depends on."""

    simulator: SimulatorSettings
    demonstrations: DemonstrationSettings
    layout: LayoutSettings

    @model_validator(mode="after")
    def _videos_are_encoded(self) -> Self:
        if self.demonstrations.storage == "video" and self.layout.video is None:
            raise ValueError("demonstrations.storage = 'video' needs layout.video")
        return self
