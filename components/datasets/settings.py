"""Which dataset, and what is computed of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.contracts.settings import Settings


class DatasetSettings(Settings):
    """A dataset in a folder."""

    path: str = Field(min_length=1, description="Folder of a LeRobotDataset v3.0, the one that holds meta/info.json.")
    digest: str | None = Field(
        None, description="Digest that its content must have; leave out to take it as it is and be told the digest."
    )


class QuantileStatsSettings(Settings):
    """What statistics are of."""

    features: tuple[str, ...] = Field(description="Names of features; empty for all that are numbers or pictures.")
    pictures: Literal["sampled", "all"] = Field(
        description="Frames whose pictures are counted: LeRobot's length**0.75 of each episode (100 to 10,000), or all."
    )


class AugmentSettings(Settings):
    """What becomes of the dataset."""

    in_place: bool = Field(description="Put the statistics into the dataset's meta/stats.json, in one step.")
