"""Weighted mixture of datasets: an endless, seeded order of samples with random access by position."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import fsspec
import numpy as np
from numpy.typing import NDArray

from armature.components.artifacts.cache import DownloadCache
from armature.components.artifacts.fetched import FetchedFiles
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.datasets.lerobot.episodes import EpisodeRange
from armature.components.robots.datasets.lerobot.frames import FrameReader
from armature.components.robots.datasets.lerobot.language import SUBTASK
from armature.components.robots.datasets.lerobot.layout import IMAGE, VIDEO
from armature.components.robots.datasets.lerobot.reader import window
from armature.components.robots.datasets.order import FileShuffle, MixtureSchedule, Window, mixed, permuted
from armature.components.robots.datasets.quantiles import Array
from armature.components.robots.datasets.settings import FileShuffleSettings
from armature.components.robots.datasets.source import DatasetSource, FrameRuns, selection

# --- Samples of a mixture ---


@dataclass(frozen=True)
class RobotSample:
    """Training sample of a robot policy: an observation and the actions from there on, in the dataset's units.

    actions: float32 (T, action dimensions); after the end of the episode its last action is repeated.
    padding: bool (T,), True for repeated actions.
    tag: names the statistics that normalize the sample. source: number of the dataset in the mixture. frame: number of
        the frame in its episode. weight: factor of the sample's loss.
    """

    observation: RobotObservation
    actions: NDArray[np.float32]
    padding: NDArray[np.bool_]
    tag: str
    source: int
    episode: int
    frame: int
    weight: float = 1.0


class FrameIndex(NamedTuple):
    """Frame number of a source, counted over the source's selected episodes."""

    source: int
    frame: int


class Mixture:
    """Samples of several datasets, mixed by weight.

    Each source gets a share of positions in proportion to its weight, and all of its frames are used once, in shuffled
    order, before any is repeated. The order is a function of seed and position: a run resumes by continuing at a
    position, and ranks divide the positions among them. With `file_shuffle` and several sources, the lanes of a source
    may reach its next epoch at different times.

    A mixture can be pickled for loader processes and shared by threads.
    """

    def __init__(
        self,
        sources: Sequence[DatasetSource],
        horizon: int,
        seed: int,
        file_shuffle: FileShuffleSettings | None = None,
    ) -> None:
        """Mix the sources.

        Args:
            horizon: number of actions of a sample, for sources without their own horizon.
            file_shuffle: settings of the order with locality; None: all frames of a source are shuffled.

        Raises:
            ConfigurationError: there are no sources, or a source's action is not a numeric feature.
        """
        if not sources:
            raise ConfigurationError("a mixture needs at least one dataset", code="no_datasets")
        for source in sources:
            if not source.dataset.feature(source.action).is_number:
                raise ConfigurationError(
                    f"the action {source.action!r} is not numeric",
                    code="feature_not_numeric",
                    where=str(source.dataset.files),
                )
        self.sources = tuple(sources)
        self.horizons = tuple(source.horizon or horizon for source in sources)
        self._seed = seed
        self._schedule = MixtureSchedule([source.weight for source in sources], seed)
        cache = DownloadCache.standard()
        self._frames = [FrameReader(source.dataset, cache) for source in sources]
        self._runs = [source.frames for source in sources]
        self.file_shuffle = None
        if file_shuffle is not None:
            weights = [source.weight for source in sources]
            self.file_shuffle = FileShuffle(weights, list(map(_file_bounds, sources, self._runs)), file_shuffle, seed)

    @property
    def horizon(self) -> int:
        """Longest horizon of the sources."""
        return max(self.horizons)

    @property
    def frames(self) -> int:
        """Number of frames that are used, of all sources."""
        return sum(int(runs.stops[-1]) for runs in self._runs)

    def place(self, position: int) -> FrameIndex:
        """Return the frame at `position`, 0 or more."""
        if self.file_shuffle is not None:
            return FrameIndex(*self.file_shuffle.at(position))
        source, taken = self._schedule.at(position)
        size = int(self._runs[source].stops[-1])
        epoch, index = divmod(taken, size)
        return FrameIndex(source, permuted(index, size, mixed(self._seed, source, epoch)))

    def __getitem__(self, position: int) -> RobotSample:
        return self.sample(self.place(position))

    def every(self) -> Iterator[FrameIndex]:
        """Yield each frame once, in the order of the datasets."""
        return map(self.nth, range(self.frames))

    def nth(self, number: int) -> FrameIndex:
        """Return the frame that `every` yields at index `number`, from 0."""
        ends = np.cumsum([int(runs.stops[-1]) for runs in self._runs])
        source = int(np.searchsorted(ends, number, side="right"))
        return FrameIndex(source, number - int(ends[source - 1]) if source else number)

    def sample(self, place: FrameIndex) -> RobotSample:
        """Read the sample at a frame.

        Raises:
            DataError: a data file, a video or an image is missing or damaged.
        """
        source, frames = self.sources[place.source], self._frames[place.source]
        episode, frame = self._episode(place)
        state = np.zeros(0, np.float32)
        if source.state is not None:
            state = frames.numbers(source.state, episode, np.array([frame]))[0].astype(np.float32)
        images = {key: frames.image(feature, episode, frame) for key, feature in source.cameras.items()}
        prompt = (frames.subtask if source.prompt == SUBTASK else frames.task)(episode, frame)
        observation = RobotObservation(images, state, prompt)
        weight = 1.0
        if source.frame_weights is not None:
            weight = float(frames.numbers(source.frame_weights, episode, np.array([frame]))[0, 0])
        return RobotSample(observation, *self.actions(place), source.tag, place.source, episode.index, frame, weight)

    def actions(self, place: FrameIndex) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the actions and the padding mask of the sample at a frame, without reading its images."""
        episode, frame = self._episode(place)
        places, padding = window(frame, episode.length, range(self.horizons[place.source]))
        values = self._frames[place.source].numbers(self.sources[place.source].action, episode, places)
        return values.astype(np.float32), padding

    def files(self, source: int, first: int, stop: int) -> Iterator[PurePosixPath]:
        """Yield the data and video files that must be downloaded completely to read some frames of a source.

        These are frames `first` to `stop` (exclusive) of those that are used.
        """
        used = self.sources[source]
        dataset, info = used.dataset, used.dataset.info
        ends = (self._episode(FrameIndex(source, frame))[0].index for frame in (first, stop - 1))
        episodes = selection(used.episodes).between(*ends)
        cameras = set(used.cameras.values())
        images = {name for name, feature in info.features.items() if feature.dtype == IMAGE}
        if not images or images & cameras:
            for chunk, file in dataset.episodes.files_of(episodes, None):
                yield info.data_file(chunk, file)
        for name in sorted(cameras - images):
            for chunk, file in dataset.episodes.files_of(episodes, name):
                yield info.video_file(name, chunk, file)

    def _episode(self, place: FrameIndex) -> tuple[EpisodeRange, int]:
        """Return the episode of the frame, and the frame's number in it."""
        frame = int(self._runs[place.source].at(place.frame))
        episode = self.sources[place.source].dataset.episode_at(frame)
        return episode, frame - episode.start


def _file_bounds(source: DatasetSource, runs: FrameRuns) -> Array:
    """Return the bounds of a source's files, an array (files + 1,).

    It has the index of each file's first frame, and at its end the number of frames. Only selected frames are counted.
    """
    dataset = source.dataset
    videos = [name for name in source.cameras.values() if dataset.feature(name).dtype == VIDEO]
    return np.unique(np.append(runs.before(dataset.episodes.file_starts(videos)), runs.stops[-1]))


# --- Downloading files of remote datasets before their samples are read ---

AT_ONCE = 4
"""Number of files downloaded at the same time."""
STOP_WITHIN = 2.0
"""Seconds that `FilePrefetch` waits for each download thread when it stops. A thread notices the stop only when it has
received the next part of its file."""
log = logging.getLogger(__name__)


class FilePrefetch:
    """Downloads the files of the next window while samples of the current window are read.

    This needs a mixture with `file_shuffle`. Only windows that end before position `stop` are downloaded, so that no
    file is downloaded in vain. A file that cannot be downloaded is left to its reader; a reader that needs a file while
    it is being downloaded waits for it.
    """

    def __init__(self, mixture: Mixture, stop: int) -> None:
        self._shuffle, self._mixture, self._stop = mixture.file_shuffle, mixture, stop
        self._windows, self._asked = set[Window](), set[tuple[int, PurePosixPath]]()
        self._remote = {
            number: source.dataset.files
            for number, source in enumerate(mixture.sources)
            if isinstance(source.dataset.files, FetchedFiles) and not source.dataset.files.ranges
        }
        self._queue: SimpleQueue[tuple[int, PurePosixPath] | None] = SimpleQueue()
        self._stopped = threading.Event()
        needed = AT_ONCE if self._shuffle and self._remote else 0
        self._threads = [threading.Thread(target=self._fetch, daemon=True) for _ in range(needed)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop downloading and leave no partial file behind."""
        self._stopped.set()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(STOP_WITHIN)

    def reach(self, positions: Iterable[int]) -> None:
        """Queue downloads for positions that are being read now: the files of their windows and of the next windows."""
        if self._shuffle is None or not self._threads:
            return
        for shuffled in map(self._shuffle.window, positions):
            if shuffled.source not in self._remote or shuffled in self._windows:
                continue
            self._windows.add(shuffled)
            for each in self._shuffle.windows(shuffled, self._stop):
                for first, stop in self._shuffle.frames(each):
                    for name in self._mixture.files(each.source, first, stop):
                        self._want(each.source, name)

    def _want(self, source: int, name: PurePosixPath) -> None:
        if (source, name) not in self._asked:
            self._asked.add((source, name))
            self._queue.put((source, name))

    def _fetch(self) -> None:
        while (wanted := self._queue.get()) and not self._stopped.is_set():
            source, name = wanted
            try:
                self._remote[source].fetch(name, fsspec.Callback(hooks={"stop": self._end_if_stopped}))
            except Exception as error:  # the reader of the file gets the same error
                if not self._stopped.is_set():
                    log.warning("prefetch failed: %s", error)

    def _end_if_stopped(self, size: int | None, value: int, **_: Any) -> None:
        """Raise InterruptedError if downloading was stopped. fsspec calls this for each part of a file."""
        if self._stopped.is_set():
            raise InterruptedError("download was stopped")
