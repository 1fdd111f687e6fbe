"""Settings of datasets: their location, statistics, order and encoding."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from armature.components.contracts.settings import Settings

QUICK = "quick"
"""Value, and prefix, of a digest that is computed without reading data or videos."""
_DIGEST = (
    "Expected digest of the content. If left out, the dataset is used as it is and its digest is logged. quick: a "
    "digest of names, sizes and times or ETags, and of the content of meta/ only."
)


class SourceSettings(Settings):
    """A dataset and how a policy uses it."""

    path: str = Field(min_length=1)
    """A LeRobotDataset v3.0 or v3.1: a folder (with meta/info.json), a hub name (owner/name), or a URL
    (s3://bucket/dataset).
    From the hub and URLs only the files that are needed are downloaded."""
    revision: str | None = None
    """Commit of a hub dataset; required for hub names."""
    digest: str | None = Field(None, description=_DIGEST)
    tag: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    """Name of the robot. Datasets with the same tag share their statistics."""
    weight: PositiveFloat = 1.0
    """Share of the samples, relative to the sum of all weights."""
    horizon: PositiveInt | None = None
    """Actions per chunk, at the dataset's fps; none: the policy's value."""
    state: str | None = None
    """Feature with the state; none: observation.state, if it exists."""
    action: str | None = None
    """Feature with the action; none: the feature called action."""
    cameras: dict[str, str] | None = None
    """Features of cameras by the policy's name of the camera; none: all cameras, by their own names."""
    episodes: tuple[NonNegativeInt, ...] | None = None
    """Episodes to use; none: all."""
    tasks: tuple[str, ...] | None = Field(None, min_length=1)
    """Texts of tasks: only frames of these tasks are used; none: all."""
    frame_weights: str | None = Field(None, min_length=1)
    """Feature with one number a frame, 0 or more, by which the frame's loss is multiplied: an advantage, or
    intervention for corrections by people alone. Frames with 0 are left out; none: every frame counts alike."""
    prompt: Literal["task", "subtask"] = "task"
    """Text that the policy is given. task: the frame's task. subtask: the subtask that is active at the frame, in the
    column language_persistent of v3.1."""


ALONE = "default"
"""Tag of a dataset that is specified by its path only."""


class DatasetSettings(Settings):
    """One dataset by its path, or a mixture of several."""

    path: str | None = Field(None, min_length=1)
    """Folder, hub name or URL of a single dataset."""
    revision: str | None = None
    """Commit of a hub dataset; required for hub names."""
    digest: str | None = Field(None, description=_DIGEST)
    sources: tuple[SourceSettings, ...] | None = None
    """Several datasets to mix, instead of path."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.path) == bool(self.sources):
            raise ValueError("set either path or sources")
        if self.sources and (self.revision or self.digest):
            raise ValueError("sources have their own revision and digest: set them there")
        return self

    def listed(self) -> tuple[SourceSettings, ...]:
        """Return all datasets. A single dataset has the tag `ALONE`."""
        if self.path is None:
            return self.sources or ()
        return (SourceSettings(path=self.path, revision=self.revision, digest=self.digest, tag=ALONE, weight=1.0),)


class QuantileStatsSettings(Settings):
    """Settings of the statistics of datasets."""

    features: tuple[str, ...] = ()
    """Names of features; empty: all features that are numbers or images."""
    images: Literal["sampled", "all"] = "sampled"
    """Frames whose images are counted: sampled (length**0.75 of each episode, 100 to 10,000, as in LeRobot) or all."""


class AugmentStatsSettings(Settings):
    """Settings of the step that puts statistics into a dataset."""

    in_place: bool = False
    """Replace the dataset's meta/stats.json by the statistics, atomically."""


class FileShuffleSettings(Settings):
    """Settings of an order that shuffles files, and frames within a few files, so that a rank only reads its own
    files."""

    lanes: PositiveInt = 8
    """Number of lanes that each epoch's files are divided into; sample p belongs to lane p % lanes. Use a multiple of
    the number of the trainer's ranks."""
    window: PositiveInt = 8
    """Number of files of a lane whose frames are shuffled together."""


# --- Files and encoding of a new dataset ---


class VideoSettings(Settings):
    """Settings of video encoding. The defaults are LeRobot's."""

    codec: str = "libsvtav1"
    """Encoder of PyAV: libsvtav1, libx264, ..."""
    pixel_format: str = "yuv420p"
    """Pixel format; every player supports yuv420p."""
    quality: NonNegativeInt = 30
    """The encoder's crf: lower is better quality and larger files."""
    keyframe_every: PositiveInt = 2
    """Number of frames from one keyframe to the next."""


class LayoutSettings(Settings):
    """Settings of a new dataset's files. The defaults are LeRobot's."""

    chunks_size: PositiveInt = 1000
    """Maximum number of files in a folder."""
    data_files_size_in_mb: PositiveFloat = 100.0
    """Size in MiB at which a data file is closed and the next is started."""
    video_files_size_in_mb: PositiveFloat = 200.0
    """Size in MiB at which a video file is closed and the next is started."""
    video: VideoSettings | None = VideoSettings()
    """Video encoding; required if a feature is a video."""
