"""How a new dataset is laid out and encoded."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from components.contracts.settings import Settings


class VideoSettings(Settings):
    """How frames are encoded."""

    codec: str = Field(description="A PyAV encoder: libsvtav1 (as LeRobot), libx264, ...")
    pixel_format: str = Field(description="yuv420p is what every player shows.")
    quality: NonNegativeInt = Field(description="The encoder's crf: lower is better and larger. LeRobot has 30.")
    keyframe_every: PositiveInt = Field(description="Frames from one that stands alone to the next. LeRobot has 2.")


class LayoutSettings(Settings):
    """How a new dataset is laid out."""

    chunks_size: PositiveInt = Field(description="Most files of a folder. LeRobot has 1000.")
    data_files_size_in_mb: PositiveFloat = Field(description="A data file this large is the last one's. LeRobot: 100.")
    video_files_size_in_mb: PositiveFloat = Field(description="The same for video files. LeRobot: 200.")
    video: VideoSettings | None = Field(None, description="How videos are encoded; needed where a feature is one.")
