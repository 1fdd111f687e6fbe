"""Videos: a few frames with their times, chosen once from a file, in one animated PNG.

A model reads few frames of a video. They are chosen here, when a video comes in, so that the model server, the trainer
and pages show the same frames with the same times. The animated PNG keeps all pixels, and a text in it the times. The
image store holds it as it holds images, and browsers play it.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydantic import Field

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign
from armature.components.contracts.images import VIDEO, EncodedImage
from armature.components.contracts.installation import install_command
from armature.components.contracts.settings import Settings

if TYPE_CHECKING:
    from types import ModuleType

MOST_FRAMES = 1024
"""Most frames of a video that a model reads."""
MAX_FILE_BYTES = 2**30
"""Largest video file."""
MAX_FILE_FRAMES = 200_000
"""Most frames of a video file. Two hours at 25 frames per second have 180,000."""
MAX_FRAME_PIXELS = 16 * 10**6
"""Most pixels of a frame in a video file."""
VIDEO_HEAD = 12
"""Number of bytes by which `is_video` knows a file."""
_TIMES = "times"


class FrameSettings(Settings):
    """The frames of a video that a model reads.

    Example:
        >>> FrameSettings(fps=1.0, most=4).chosen([number / 10 for number in range(100)])
        [0, 33, 66, 99]
    """

    fps: float = Field(2.0, gt=0)
    """Frames per second of video that the model reads."""
    most: int = Field(32, ge=1, le=MOST_FRAMES)
    """Most frames; a longer video has this many, evenly spaced."""
    pixels: int = Field(448 * 448, ge=28 * 28, le=MAX_FRAME_PIXELS)
    """Most pixels of a frame; larger frames are scaled down."""

    def chosen(self, times: Sequence[float]) -> list[int]:
        """Return the indices of the frames to read, ascending. `times` are all frames' seconds, ascending."""
        first, seconds = times[0], times[-1] - times[0]
        count, step = math.floor(seconds * self.fps + 1e-6) + 1, 1 / self.fps
        if count == 1 or count > self.most:  # models read frames in pairs
            count = min(max(count, 2), self.most)
            step = seconds / max(count - 1, 1)
        wanted = [first + number * step for number in range(count)]
        indices, at = [], 0
        for time in wanted:
            while at + 1 < len(times) and abs(times[at + 1] - time) <= abs(times[at] - time):
                at += 1
            indices.append(at)
        return list(dict.fromkeys(indices))


@dataclass(frozen=True)
class Video:
    """The frames of a video that a model reads: RGB images of one size, and the seconds at which each is shown."""

    frames: tuple[Image.Image, ...]
    times: tuple[float, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.frames[0].size

    @property
    def fps(self) -> float:
        """Frames per second, on average; 1 for a single frame."""
        seconds = self.times[-1] - self.times[0]
        return (len(self.times) - 1) / seconds if seconds else 1.0

    @property
    def metadata(self) -> dict[str, Any]:
        """The arguments of transformers' `VideoMetadata`. Frame numbers are such that number / fps is a time."""
        numbers = [time * self.fps for time in self.times]
        return {"total_num_frames": len(numbers), "fps": self.fps, "frames_indices": numbers}


def encode_video(frames: Sequence[Image.Image], times: Sequence[float]) -> EncodedImage:
    """Encode frames in RGB and their times in seconds as an animated PNG, which an observation can show.

    Raises:
        DataError: there are no frames or too many, they differ in size, or the times do not ascend.

    Example:
        >>> clip = encode_video([Image.new("RGB", (4, 2), color) for color in ("red", "blue")], [0.0, 0.5])
        >>> decode_video(clip).times
        (0.0, 0.5)
    """
    _check(frames, times)
    text = PngInfo()
    text.add_text(_TIMES, json.dumps([float(time) for time in times]))
    gaps = [round(1000 * (later - time)) for time, later in pairwise(times)]
    out = io.BytesIO()
    frames[0].save(
        out,
        "PNG",
        save_all=True,
        append_images=frames[1:],
        pnginfo=text,
        compress_level=1,
        duration=[min(max(gap, 1), 65535) for gap in [*gaps, gaps[-1] if gaps else 1000]],
        loop=0,
        blend=[number % 2 for number in range(len(frames))],  # otherwise Pillow joins equal frames to one
    )
    return EncodedImage(out.getvalue(), VIDEO)


def decode_video(video: EncodedImage) -> Video:
    """Return the frames and times of a video that `encode_video` has encoded.

    Raises:
        DataError: it is damaged, or another kind of file.
    """
    damaged = foreign("the video is damaged", where="an animated PNG")
    with damaged, Image.open(io.BytesIO(video.data), formats=["PNG"]) as opened:
        times = video_times(opened)
        frames = []
        for number in range(len(times)):
            opened.seek(number)
            frames.append(opened.convert("RGB"))
        _check(frames, times)
    return Video(tuple(frames), times)


def video_times(opened: Image.Image) -> tuple[float, ...]:
    """Return the times of an opened video, one for each of its frames.

    Raises:
        DataError: it is not a video that `encode_video` has encoded.
    """
    times = tuple(json.loads(opened.info.get(_TIMES, "[]")))
    frames = getattr(opened, "n_frames", 1)
    if opened.mode != "RGB" or len(times) != frames:
        raise DataError(
            f"an animated PNG of mode {opened.mode} with {frames} frames and {len(times)} times",
            code="video_unreadable",
            remedy="encode frames with armature.encode_video, or read a file with armature.read_video",
        )
    return times


def _check(frames: Sequence[Image.Image], times: Sequence[float]) -> None:
    """Raise a DataError unless frames and times make a video."""
    what = ""
    if not 0 < len(frames) <= MOST_FRAMES or len(frames) != len(times):
        what = f"{len(frames)} frames and {len(times)} times; it has 1 to {MOST_FRAMES} of both"
    elif {frame.mode for frame in frames} != {"RGB"}:
        what = f"frames of mode {', '.join(sorted({frame.mode for frame in frames}))} instead of RGB"
    elif len({frame.size for frame in frames}) > 1:
        what = "frames of several sizes"
    elif not all(math.isfinite(time) for time in times) or any(one >= other for one, other in pairwise(times)):
        what = f"times that do not ascend: {list(times)!r:.80}"
    if what:
        raise DataError(f"a video has {what}", code="video_frames_invalid", remedy="give as many times as frames")


def pyav() -> ModuleType:
    """Import and return PyAV.

    Raises:
        ConfigurationError: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ConfigurationError(
            "videos need the package PyAV", code="package_missing", remedy=install_command("datasets")
        ) from error
    return av


def read_video(source: Path | bytes, settings: FrameSettings | None = None) -> EncodedImage:
    """Read a video file or its bytes (MP4, WebM, Matroska, AVI, GIF) and return the frames that `settings` choose.

    Raises:
        DataError: the file is damaged, has no frames, or is larger than the limits of this module.
        ConfigurationError: PyAV is not installed.
    """
    times, settings, name = frame_times(source), settings or FrameSettings(), _name(source)
    with foreign("the video cannot be decoded", where=name, remedy="record it again, or leave the row out"):
        wanted = {times[at] for at in settings.chosen(times)}
        frames: dict[float, Image.Image] = {}
        for time, image in _frames(source):
            if time in wanted:
                frames[time - times[0]] = _scaled(image, settings.pixels)
            if len(frames) == len(wanted):
                break
    if len(frames) < len(wanted):
        raise DataError(
            f"the video ends after {len(frames)} of the {len(wanted)} frames to read",
            code="video_truncated",
            where=name,
            remedy="record it again, or leave the row out",
        )
    return encode_video(list(frames.values()), list(frames))


def frame_times(source: Path | bytes) -> list[float]:
    """Return the seconds of all frames of a video file, ascending. Nothing is decoded.

    Raises:
        DataError, ConfigurationError: see `read_video`.
    """
    name = _name(source)
    with foreign("the video cannot be opened", where=name, remedy="record it again, or leave the row out"):
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        if size > MAX_FILE_BYTES:
            raise _too_large(f"{size} bytes, more than {MAX_FILE_BYTES}", name)
        times = sorted(_packet_times(source, name))
    if not times:
        raise DataError("the video has no frames", code="video_empty", where=name)
    return times


def choose_frames(frames: Sequence[Image.Image], times: Sequence[float], settings: FrameSettings) -> EncodedImage:
    """Return the video of those frames that `settings` choose.

    Raises:
        DataError: see `encode_video`.
    """
    _check(frames, times)
    chosen = settings.chosen(times)
    return encode_video([_scaled(frames[at], settings.pixels) for at in chosen], [times[at] for at in chosen])


def is_video(data: bytes) -> bool:
    """Check by the first bytes whether a file is a video that `read_video` may read."""
    riff = data[:4] == b"RIFF" and data[8:12] == b"AVI "
    return riff or data[4:8] == b"ftyp" or data.startswith((b"\x1aE\xdf\xa3", b"GIF8"))


def _name(source: Path | bytes) -> str:
    return str(source) if isinstance(source, Path) else "a video"


def _opened(source: Path | bytes) -> Any:
    return pyav().open(str(source) if isinstance(source, Path) else io.BytesIO(source), metadata_errors="replace")


def _packet_times(source: Path | bytes, name: str) -> list[float]:
    """Return the seconds of all frames, in any order, without decoding them."""
    with _opened(source) as container:
        if not container.streams.video:
            return []
        stream = container.streams.video[0]
        if stream.width * stream.height > MAX_FRAME_PIXELS:
            raise _too_large(f"frames of {stream.width}x{stream.height} pixels, more than {MAX_FRAME_PIXELS}", name)
        times = []
        for packet in container.demux(stream):
            if packet.pts is not None and not packet.is_discard:
                times.append(float(packet.pts * stream.time_base))
            if len(times) > MAX_FILE_FRAMES:
                raise _too_large(f"more than {MAX_FILE_FRAMES} frames", name)
        return times


def _frames(source: Path | bytes) -> Iterator[tuple[float, Image.Image]]:
    """Yield the seconds and the upright image of each frame, in the order in which they are shown."""
    with _opened(source) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            image: Image.Image = frame.to_image()
            yield float(frame.pts * stream.time_base), image.rotate(frame.rotation, expand=True)


def _scaled(image: Image.Image, pixels: int) -> Image.Image:
    share = math.sqrt(pixels / (image.width * image.height))
    if share >= 1:
        return image
    size = (max(1, math.floor(image.width * share)), max(1, math.floor(image.height * share)))
    return image.resize(size, Image.Resampling.BICUBIC)


def _too_large(what: str, name: str) -> DataError:
    return DataError(
        f"the video has {what}", code="video_too_large", where=name, remedy="cut it to the part that is asked about"
    )
