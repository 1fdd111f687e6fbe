"""How rollouts become training samples."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, PositiveInt

from components.contracts.settings import Settings


class BatchSettings(Settings):
    """Group-relative advantages and what a training sequence may be."""

    model_config = ConfigDict(title="Batches")

    scale: Literal["group_std", "batch_std", "none"] = Field(
        description="What centred rewards are divided by; none is Dr. GRPO's choice."
    )
    skip_zero_variance: bool = Field(
        description="Leave out groups whose members all have the same reward; they carry no gradient."
    )
    max_sequence_tokens: PositiveInt = Field(description="Turns that would end beyond this are dropped and counted.")
