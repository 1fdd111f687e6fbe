"""How a new dataset is laid out and encoded."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from armature.components.contracts.settings import Settings


class VideoSettings(Settings):
    """How frames are encoded. The defaults are LeRobot's."""

    codec: str = Field("libsvtav1", description="A PyAV encoder: libsvtav1, libx264, ...")
    pixel_format: str = Field("yuv420p", description="Pixel format; yuv420p is what every player shows.")
    quality: NonNegativeInt = Field(30, description="The encoder's crf: lower is better and larger.")
    keyframe_every: PositiveInt = Field(2, description="Frames from one keyframe to the next.")


class LayoutSettings(Settings):
    """How a new dataset is laid out. The defaults are LeRobot's."""

    chunks_size: PositiveInt = Field(1000, description="Most files of a folder.")
    data_files_size_in_mb: PositiveFloat = Field(100.0, description="A data file is closed at this size.")
    video_files_size_in_mb: PositiveFloat = Field(200.0, description="A video file is closed at this size.")
    video: VideoSettings | None = Field(
        VideoSettings(), description="How videos are encoded; needed where a feature is one."
    )
