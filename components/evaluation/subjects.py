"""What is evaluated: one checkpoint, or a table of checkpoints and seeds."""

from __future__ import annotations

from pydantic import ConfigDict, Field, NonNegativeInt

from armature.components.contracts.settings import Settings

CHECKPOINT = (
    "An artifact's folder or digest, models:/NAME@ALIAS of MLflow, a hub name, or tiny/FAMILY; the last two "
    "are loaded as the section model says."
)


class SubjectSettings(Settings):
    """The checkpoint that is evaluated."""

    model_config = ConfigDict(title="Subject")

    checkpoint: str = Field(min_length=1, description=CHECKPOINT)


class SweepSettings(Settings):
    """Every checkpoint is evaluated with every seed."""

    model_config = ConfigDict(title="Sweep")

    checkpoints: list[str] = Field(min_length=1, description=f"Each: {CHECKPOINT[0].lower()}{CHECKPOINT[1:]}")
    seeds: list[NonNegativeInt] = Field(min_length=1, description="Seeds of the requests, one evaluation each.")
