"""Which dataset, and what is computed of it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from armature.components.contracts.settings import Settings

QUICK = "quick"
"""Asks for a digest that reads no data and no video, and begins it."""
_DIGEST = (
    "Digest that its content must have; leave out to take it as it is and be told the digest. quick: of names, sizes "
    "and times or ETags, and of the content of meta/ alone."
)


class SourceSettings(Settings):
    """A dataset, and how a policy is to see it."""

    path: str = Field(min_length=1)
    """A LeRobotDataset v3.0: its folder (that holds meta/info.json), its hub name (owner/name), or a URL
    (s3://bucket/dataset). Of the last two only the files that are needed are fetched."""
    revision: str | None = None
    """Commit of a hub dataset; needed for hub names."""
    digest: str | None = Field(None, description=_DIGEST)
    tag: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    """Names the robot: datasets of one tag share their statistics."""
    weight: PositiveFloat = 1.0
    """Its share of the samples, over the sum of all weights."""
    horizon: PositiveInt | None = None
    """Actions of a chunk at its own fps; none: the policy's."""
    state: str | None = None
    """Feature with the state; none: observation.state, if there is one."""
    action: str | None = None
    """Feature with the action; none: action."""
    cameras: dict[str, str] | None = None
    """The policy's name of each camera and the dataset's feature; none: all, by their own names."""
    episodes: tuple[NonNegativeInt, ...] | None = None
    """The episodes that are used; none: all."""


ALONE = "default"
"""The tag of a dataset that is given by its path alone."""


class DatasetSettings(Settings):
    """One dataset by its path, or several to be mixed."""

    path: str | None = Field(None, min_length=1)
    """Folder, hub name or URL of the only dataset."""
    revision: str | None = None
    """Commit of a hub dataset; needed for hub names."""
    digest: str | None = Field(None, description=_DIGEST)
    sources: tuple[SourceSettings, ...] | None = None
    """Several datasets, instead of path."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.path) == bool(self.sources):
            raise ValueError("give either path or sources")
        if self.sources and (self.revision or self.digest):
            raise ValueError("each of the sources has its own revision and digest")
        return self

    def listed(self) -> tuple[SourceSettings, ...]:
        """All datasets; the only one has the tag `ALONE`."""
        if self.path is None:
            return self.sources or ()
        return (SourceSettings(path=self.path, revision=self.revision, digest=self.digest, tag=ALONE, weight=1.0),)


class QuantileStatsSettings(Settings):
    """What statistics are of."""

    features: tuple[str, ...] = ()
    """Names of features; empty for all that are numbers or images."""
    images: Literal["sampled", "all"] = "sampled"
    """Frames whose images are counted: sampled (LeRobot's length**0.75 of each episode, 100 to 10,000) or all."""


class AugmentStatsSettings(Settings):
    """What becomes of the dataset."""

    in_place: bool = False
    """Put the statistics into the dataset's meta/stats.json, in one step."""


class FileShuffleSettings(Settings):
    """Shuffles files, and frames within a few files: a rank reads only the files of its lanes."""

    lanes: PositiveInt = 8
    """Lanes that each epoch's files are dealt to; sample p is of lane p % lanes. A multiple of the trainer's ranks."""
    window: PositiveInt = 8
    """Files of a lane whose frames are shuffled together."""


# How a new dataset is laid out and encoded.


class VideoSettings(Settings):
    """How frames are encoded. The defaults are LeRobot's."""

    codec: str = "libsvtav1"
    """A PyAV encoder: libsvtav1, libx264, ..."""
    pixel_format: str = "yuv420p"
    """Pixel format; yuv420p is what every player shows."""
    quality: NonNegativeInt = 30
    """The encoder's crf: lower is better and larger."""
    keyframe_every: PositiveInt = 2
    """Frames from one keyframe to the next."""


class LayoutSettings(Settings):
    """How a new dataset is laid out. The defaults are LeRobot's."""

    chunks_size: PositiveInt = 1000
    """Most files of a folder."""
    data_files_size_in_mb: PositiveFloat = 100.0
    """A data file is closed at this size."""
    video_files_size_in_mb: PositiveFloat = 200.0
    """A video file is closed at this size."""
    video: VideoSettings | None = VideoSettings()
    """How videos are encoded; needed where a feature is one."""
