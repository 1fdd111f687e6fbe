"""Videos of a dataset: reading frames by time, and appending episodes to a file."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

from armature.components.artifacts.videos import pyav
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign
from armature.components.robots.datasets.quantiles import Array
from armature.components.robots.datasets.settings import VideoSettings


def codec_name(encoder: str) -> str:
    """Return the name of the codec that an encoder writes, such as h264 for libx264.

    Raises:
        ConfigurationError: PyAV has no such encoder.
    """
    av = pyav()
    try:
        return str(av.Codec(encoder, "w").canonical_name)
    except (av.FFmpegError, ValueError) as error:
        raise ConfigurationError(f"PyAV cannot encode {encoder!r}: {error}", code="encoder_unavailable") from error


class VideoFile(NamedTuple):
    """A video file: its name in error messages, and a function that opens it as a path or a seekable stream."""

    name: str
    view: Callable[[], AbstractContextManager[Path | IO[bytes]]]


def read_frames(file: VideoFile, times: Sequence[float], tolerance: float, where: str) -> Iterator[Image.Image]:
    """Yield the RGB frames nearest to `times` (seconds, ascending).

    Raises:
        DataError: the file cannot be decoded, or has no frame within `tolerance` seconds of a time.
    """
    with VideoReader(file, threads=0) as reader:
        for frame in reader.frames(times, tolerance, where):
            yield frame.to_image()


class VideoReader:
    """Reader of one video file, which is opened when the first frame is read.

    threads: number of decoding threads; 0: as many as there are cores.
    """

    def __init__(self, file: VideoFile, threads: int) -> None:
        self._file, self._threads = file, threads
        self._opened = ExitStack()
        self._container: Any = None

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def frame(self, time: float, tolerance: float, where: str) -> Array:
        """Return the frame nearest to `time`, uint8 RGB (height, width, 3); see `frames`."""
        (nearest,) = self.frames([time], tolerance, where)
        array: Array = nearest.to_ndarray(format="rgb24")
        return array

    def frames(self, times: Sequence[float], tolerance: float, where: str) -> Iterator[Any]:
        """Yield PyAV's frames nearest to `times` (seconds, ascending).

        Raises:
            DataError: the file cannot be decoded, is marked as rotated, or has no frame within `tolerance` seconds of a
                time.
        """
        wanted = list(times)
        with foreign(
            "the video cannot be decoded", where=f"{self._file.name}, {where}", remedy="fetch or record it again"
        ):
            stream = self._open()
            for frame in self._decoded(stream, times[0], tolerance):
                if frame.rotation:
                    raise DataError(
                        f"the video is marked as rotated by {frame.rotation} degrees, which is not supported",
                        code="video_rotated",
                        where=f"{self._file.name}, {where}",
                        remedy="encode its frames upright",
                    )
                while wanted and abs(frame.time - wanted[0]) <= tolerance:
                    yield frame
                    wanted.pop(0)
                if not wanted:
                    return
                if frame.time > wanted[0] + tolerance:
                    break
        raise DataError(
            f"the video has no frame at {wanted[0]:.4f} s",
            code="video_frame_missing",
            where=f"{self._file.name}, {where}, frame {len(times) - len(wanted)} of the {len(times)} requested",
            remedy="the video is truncated, its frames are not at the rows' times, or from_timestamp is wrong",
        )

    def close(self) -> None:
        """Close the file."""
        self._opened.close()
        self._container = None

    def _decoded(self, stream: Any, time: float, tolerance: float) -> Iterator[Any]:
        """Yield frames in order, from the frame at `time` or an earlier frame to the end of the file.

        PyAV seeks to a keyframe by decoding time. If frames refer to later frames, a frame is decoded earlier than it
        is shown, and the keyframe that was found may be after `time`: then an earlier keyframe is searched.
        """
        back = tolerance
        while True:
            begin = max(0, int((time - back) / stream.time_base))
            self._container.seek(begin, stream=stream)
            frames = self._container.decode(stream)
            first = next(frames, None)
            if not begin or (first is not None and first.time <= time + tolerance):
                break
            back = max(1.0, 4 * back)
        if first is not None:
            yield first
            yield from frames

    def _open(self) -> Any:
        if self._container is None:
            source = self._opened.enter_context(self._file.view())
            opened = pyav().open(str(source) if isinstance(source, Path) else source, metadata_errors="replace")
            self._container = self._opened.enter_context(opened)
            stream = self._container.streams.video[0]
            stream.thread_count = self._threads
            stream.thread_type = "AUTO"
        return self._container.streams.video[0]


class VideoReaders(threading.local):
    """Cache of the `OPEN` last used video readers. Each thread and each forked process has its own."""

    OPEN = 16

    def __init__(self) -> None:
        self._readers: OrderedDict[str, VideoReader] = OrderedDict()
        self._process = os.getpid()

    def at(self, file: VideoFile) -> VideoReader:
        """Return the reader of a file."""
        if self._process != os.getpid():  # forked processes share the position in an open file
            self._readers, self._process = OrderedDict(), os.getpid()
        reader = self._readers.pop(file.name, None) or VideoReader(file, threads=1)
        self._readers[file.name] = reader
        if len(self._readers) > self.OPEN:
            self._readers.popitem(last=False)[1].close()
        return reader


_REPEATABLE = {"libx264": {"mbtree": "0"}}
"""Options, by encoder, that make encoding reproducible. With AVX-512, x264's macroblock tree (mbtree) gives different
bytes for the same frames on a busy machine."""


class VideoWriter:
    """Video file that episodes are appended to. Each episode starts with a keyframe."""

    def __init__(self, path: Path, fps: float, width: int, height: int, settings: VideoSettings) -> None:
        av = pyav()
        path.parent.mkdir(parents=True, exist_ok=True)
        rate = Fraction(fps).limit_denominator(1001)
        self.frames, self.bytes = 0, 0
        self._container = av.open(str(path.absolute()), "w")
        self._stream: Any = self._container.add_stream(settings.codec, rate=rate)
        self._stream.width, self._stream.height = width, height
        self._stream.pix_fmt = settings.pixel_format
        self._tick = 1 / rate  # the container changes its time base when writing starts
        self._stream.codec_context.time_base = self._tick
        self._stream.codec_context.gop_size = settings.keyframe_every
        self._stream.options = {"crf": str(settings.quality), **_REPEATABLE.get(settings.codec, {})}

    @property
    def seconds(self) -> float:
        """Time in the file at which the next episode starts."""
        return float(self.frames * self._tick)

    def append(self, frames: Iterable[np.ndarray[Any, Any]]) -> None:
        """Append an episode's frames, uint8 (height, width, 3)."""
        av = pyav()
        for number, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
            frame.pts, frame.time_base = self.frames, self._tick
            if number == 0:
                frame.pict_type = av.video.frame.PictureType.I
            self._mux(self._stream.encode(frame))
            self.frames += 1

    def close(self) -> None:
        """Write the remaining frames and close the file."""
        self._mux(self._stream.encode(None))
        self._container.close()

    def _mux(self, packets: list[Any]) -> None:
        self.bytes += sum(packet.size for packet in packets)
        self._container.mux(packets)
