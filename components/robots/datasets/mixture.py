"""Datasets mixed by weights: an endless, seeded order of samples in which any position can be read at once."""

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
from armature.components.robots.datasets.lerobot.layout import IMAGE, VIDEO
from armature.components.robots.datasets.lerobot.reader import window
from armature.components.robots.datasets.order import FileShuffle, MixtureSchedule, Window, mixed, permuted
from armature.components.robots.datasets.quantiles import Array
from armature.components.robots.datasets.settings import FileShuffleSettings
from armature.components.robots.datasets.source import DatasetSource, selection

# One sample that a robot policy learns from.


@dataclass(frozen=True)
class RobotSample:
    """A frame, and the actions from it on, in the dataset's units.

    actions: float32 (T, action dimensions); after the episode's last frame its action stands again.
    padding: bool (T,), True where it does.
    tag: whose statistics scale it. `source` is the mixture's number of the dataset, `frame` counts in the episode.
    """

    observation: RobotObservation
    actions: NDArray[np.float32]
    padding: NDArray[np.bool_]
    tag: str
    source: int
    episode: int
    frame: int


class FrameIndex(NamedTuple):
    """A frame of a source, counted over the source's chosen episodes."""

    source: int
    frame: int


class Mixture:
    """Samples of `sources`.

    Each source gets its weight's share of the positions, and is gone through in an order of its own, without
    repeats until all of its frames were there. The order is a function of seed and position: to resume is to go on
    at a position, and to share it among ranks is to share positions. With `file_shuffle` the lanes of a source that
    is not alone come to its next epoch one after another.
    Pickles, for loader processes; threads may share it.
    """

    def __init__(
        self,
        sources: Sequence[DatasetSource],
        horizon: int,
        seed: int,
        file_shuffle: FileShuffleSettings | None = None,
    ) -> None:
        """
        Args:
            horizon: Actions of a sample, where a source has no horizon of its own.
            file_shuffle: Of the order with locality; None shuffles all frames of a source.

        Raises:
            ConfigurationError: no sources, or one without the feature that it calls its action.
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
        runs = [selection(source.episodes).frames(source.dataset.episodes) for source in sources]
        self._firsts, self._stops = [first for first, _ in runs], [stops for _, stops in runs]
        self.file_shuffle = None
        if file_shuffle is not None:
            weights = [source.weight for source in sources]
            self.file_shuffle = FileShuffle(weights, list(map(_file_bounds, sources)), file_shuffle, seed)

    @property
    def horizon(self) -> int:
        """The longest of the sources'."""
        return max(self.horizons)

    @property
    def frames(self) -> int:
        """Of all chosen episodes."""
        return sum(int(stops[-1]) for stops in self._stops)

    def place(self, position: int) -> FrameIndex:
        """What is at `position`, 0 or more."""
        if self.file_shuffle is not None:
            return FrameIndex(*self.file_shuffle.at(position))
        source, taken = self._schedule.at(position)
        size = int(self._stops[source][-1])
        epoch, index = divmod(taken, size)
        return FrameIndex(source, permuted(index, size, mixed(self._seed, source, epoch)))

    def __getitem__(self, position: int) -> RobotSample:
        return self.sample(self.place(position))

    def every(self) -> Iterator[FrameIndex]:
        """Each frame once, in the datasets' order."""
        return map(self.nth, range(self.frames))

    def nth(self, number: int) -> FrameIndex:
        """What comes after `number` others in `every`."""
        ends = np.cumsum([int(stops[-1]) for stops in self._stops])
        source = int(np.searchsorted(ends, number, side="right"))
        return FrameIndex(source, number - int(ends[source - 1]) if source else number)

    def sample(self, place: FrameIndex) -> RobotSample:
        """
        Raises:
            DataError: a data file, a video or an image is missing or damaged.
        """
        source, frames = self.sources[place.source], self._frames[place.source]
        episode, frame = self._episode(place)
        state = np.zeros(0, np.float32)
        if source.state is not None:
            state = frames.numbers(source.state, episode, np.array([frame]))[0].astype(np.float32)
        images = {key: frames.image(feature, episode, frame) for key, feature in source.cameras.items()}
        observation = RobotObservation(images, state, frames.task(episode, frame))
        return RobotSample(observation, *self.actions(place), source.tag, place.source, episode.index, frame)

    def actions(self, place: FrameIndex) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """The sample's actions and padding alone; no image is read."""
        episode, frame = self._episode(place)
        places, padding = window(frame, episode.length, range(self.horizons[place.source]))
        values = self._frames[place.source].numbers(self.sources[place.source].action, episode, places)
        return values.astype(np.float32), padding

    def files(self, source: int, first: int, stop: int) -> Iterator[PurePosixPath]:
        """The files that samples of a source's frames `first` to `stop` (exclusive) read as a whole."""
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
        """The episode, and the frame in it."""
        firsts, stops = self._firsts[place.source], self._stops[place.source]
        run = int(np.searchsorted(stops, place.frame, side="right"))
        frame = int(firsts[run]) + place.frame - (int(stops[run - 1]) if run else 0)
        episode = self.sources[place.source].dataset.episode_at(frame)
        return episode, frame - episode.start


def _file_bounds(source: DatasetSource) -> Array:
    """Of the chosen frames, the first in each file, and their number: (files + 1,)."""
    dataset, chosen = source.dataset, selection(source.episodes)
    videos = [name for name in source.cameras.values() if dataset.feature(name).dtype == VIDEO]
    starts = chosen.before(dataset.episodes.file_starts(videos), dataset.episodes)
    return np.unique(np.append(starts, chosen.frames(dataset.episodes)[1][-1]))


# Files of datasets behind URLs, fetched before their samples are asked for.

AT_ONCE = 4
"""Files that are fetched at the same time."""
STOP_WITHIN = 2.0
"""Seconds that are waited for the next part of a file to arrive, when fetching is stopped."""
log = logging.getLogger(__name__)


class FilePrefetch:
    """While positions of a window are read, the files of the next are fetched, where `mixture` has an order of files.

    Windows are fetched that are read to their end before position `stop`, so that no file is that nobody reads. A file
    that cannot be fetched is left to who reads it; who comes to one that is being fetched waits for it.
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
        """Nothing more is fetched, and nothing stays of a file that is half here."""
        self._stopped.set()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(STOP_WITHIN)

    def reach(self, positions: Iterable[int]) -> None:
        """These are read now."""
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
            except Exception as error:  # who reads the file meets it again
                if not self._stopped.is_set():
                    log.warning("not fetched ahead: %s", error)

    def _end_if_stopped(self, size: int | None, value: int, **_: Any) -> None:
        """Called by fsspec at each part of a file that arrives."""
        if self._stopped.is_set():
            raise InterruptedError("fetching was stopped")
