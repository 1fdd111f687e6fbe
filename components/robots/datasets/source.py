"""Dataset artifacts: references to datasets (folders, hub names or URLs) with the digest of their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, overload

import numpy as np
from pydantic import BaseModel, ConfigDict

from armature.components.artifacts.cache import DownloadCache, make_once
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import read_bytes
from armature.components.contracts.installation import original
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.machine.hub import hub_commit
from armature.components.machine.project import project_path, project_source
from armature.components.robots.datasets.lerobot.episodes import EpisodeIndex
from armature.components.robots.datasets.lerobot.language import PERSISTENT, SUBTASK, check_subtasks
from armature.components.robots.datasets.lerobot.layout import INFO, DatasetFiles, LocalFiles
from armature.components.robots.datasets.lerobot.reader import Dataset, open_dataset
from armature.components.robots.datasets.quantiles import Array
from armature.components.robots.datasets.remote import RECORDED, open_files
from armature.components.robots.datasets.settings import ALONE, QUICK, DatasetSettings, SourceSettings

# --- Selection of a dataset's episodes ---


class EpisodeSelection(Sequence[int]):
    """Ascending episode numbers, stored as runs of consecutive numbers: memory grows with runs, not with episodes.

    Example:
        >>> chosen = EpisodeSelection([0, 1, 2, 7])
        >>> len(chosen), chosen[3], 5 in chosen
        (4, 7, False)
    """

    def __init__(self, numbers: Sequence[int] | Array) -> None:
        """Store the episode numbers as ranges of consecutive numbers, which saves memory.

        Args:
            numbers: ascending episode numbers without repetition.
        """
        if isinstance(numbers, range) and numbers.step == 1:
            self._firsts, self._ends = np.array([numbers.start]), np.array([len(numbers)])
            return
        listed = np.asarray(numbers, np.int64)
        begins = np.flatnonzero(np.diff(listed, prepend=-2) != 1)
        self._firsts, self._ends = listed[begins], np.append(begins[1:], len(listed))

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self.numbers()[index].tolist())
        place = range(len(self))[index]
        run = int(np.searchsorted(self._ends, place, side="right"))
        before = int(self._ends[run - 1]) if run else 0
        return int(self._firsts[run]) + place - before

    def __contains__(self, number: object) -> bool:
        run = int(np.searchsorted(self._firsts, number, side="right")) - 1 if isinstance(number, int) else -1
        return run >= 0 and number - self._firsts[run] < self._counts[run]

    @property
    def _counts(self) -> Array:
        return np.diff(self._ends, prepend=0)

    @property
    def nbytes(self) -> int:
        """Memory that the selection takes, in bytes."""
        return self._firsts.nbytes + self._ends.nbytes

    def numbers(self) -> Array:
        """Return all episode numbers, int64 (episodes,)."""
        return np.repeat(self._firsts - self._ends + self._counts, self._counts) + np.arange(len(self))

    def between(self, first: int, last: int) -> Array:
        """Return the selected episodes from `first` to `last` (inclusive), int64 (episodes,)."""
        ends = self._firsts + self._counts
        runs = range(int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(self._firsts, last, "right")))
        spans = [np.arange(max(first, self._firsts[run]), min(last + 1, ends[run])) for run in runs]
        return np.concatenate([np.zeros(0, np.int64), *spans])

    def frames(self, index: EpisodeIndex) -> FrameRuns:
        """Return the frames of the episodes, with one run per run of consecutive episodes."""
        stops = index.numbers["stop"]
        firsts = np.where(self._firsts > 0, stops[self._firsts - 1], 0)
        return FrameRuns(firsts, np.cumsum(stops[self._firsts + self._counts - 1] - firsts))


class FrameRuns(NamedTuple):
    """Selected frames of a dataset as runs of consecutive frames.

    firsts: index of each run's first frame in the dataset, (runs,).
    stops: number of selected frames in this run and all earlier ones, (runs,).
    """

    firsts: Array
    stops: Array

    def before(self, frames: Array) -> Array:
        """Return, for each dataset frame in `frames`, the number of selected frames before it, (frames,)."""
        run = np.maximum(np.searchsorted(self.firsts, frames, side="right") - 1, 0)
        begins = np.concatenate([[0], self.stops])[run]
        return begins + np.clip(frames - self.firsts[run], 0, self.stops[run] - begins)

    def at(self, places: Array | int) -> Array:
        """Return the indices in the dataset of the selected frames numbered `places`; the inverse of `before`."""
        run = np.searchsorted(self.stops, places, side="right")
        frames: Array = self.firsts[run] + places - np.where(run > 0, self.stops[run - 1], 0)
        return frames


def selection(numbers: Sequence[int]) -> EpisodeSelection:
    """Return the ascending episode numbers as an `EpisodeSelection`."""
    return numbers if isinstance(numbers, EpisodeSelection) else EpisodeSelection(numbers)


REFERENCE = "dataset.json"
STATE, ACTION = "observation.state", "action"


class DatasetReference(BaseModel):
    """Content of a dataset artifact: where the datasets are, each with its digest, instead of gigabytes of data."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: tuple[SourceSettings, ...]


@dataclass(frozen=True)
class DatasetSource:
    """An opened dataset and how a policy uses it, see `SourceSettings`.

    `cameras` maps the policy's names to features, in the policy's order. `episodes` are ascending.
    """

    dataset: Dataset
    tag: str
    weight: float
    horizon: int | None
    state: str | None
    action: str
    cameras: Mapping[str, str]
    episodes: Sequence[int]
    tasks: tuple[str, ...] | None = None
    frame_weights: str | None = None
    prompt: Literal["task", "subtask"] = "task"

    @cached_property
    def frames(self) -> FrameRuns:
        """Frames that are used: the frames of `tasks` with a weight above 0 in the selected episodes.

        Raises:
            ConfigurationError: there are none.
            DataError: a data file is damaged or inconsistent, or a frame's weight is not a number of 0 or more.
        """
        chosen = selection(self.episodes)
        if self.tasks is None and self.frame_weights is None:
            return chosen.frames(self.dataset.episodes)
        files = self.dataset.episodes.files_of(chosen.numbers(), None)
        used = np.sort(np.concatenate([self._used(*file) for file in files]))
        if not len(used):
            raise ConfigurationError(
                "no frame is selected",
                code="no_frame_selected",
                where=str(self.dataset.files),
                remedy="select other episodes or tasks, or other frame_weights",
            )
        begins = np.flatnonzero(np.diff(used, prepend=-2) != 1)
        return FrameRuns(used[begins], np.append(begins[1:], len(used)))

    def check_prompts(self) -> None:
        """Check that every frame that is used has a prompt: in each episode the first one, for subtasks go on.

        Raises:
            DataError: a frame has no subtask, or the subtasks are damaged.
        """
        if self.prompt == SUBTASK:
            index = self.dataset.episodes
            begins = np.array([index.start(number) for number in self.used_episodes().tolist()])
            check_subtasks(self.dataset, self.frames.at(self.frames.before(begins)))

    def used_episodes(self) -> Array:
        """Return the selected episodes that have a frame that is used, int64 (episodes,); see `frames`."""
        numbers = selection(self.episodes).numbers()
        if self.tasks is None and self.frame_weights is None:
            return numbers
        counts = np.diff(self.frames.before(self.dataset.episodes.numbers["stop"]), prepend=0)
        return numbers[counts[numbers] > 0]

    def _used(self, chunk: int, file: int) -> Array:
        """Return the indices in the dataset of the frames of a data file that are used, int64 (frames,)."""
        index = self.dataset.episodes
        first, last = index.in_file(chunk, file)
        numbers = np.arange(first.index, last.index + 1)
        chosen = np.isin(numbers, selection(self.episodes).between(first.index, last.index))
        names = ["task_index", self.frame_weights] if self.frame_weights is not None else ["task_index"]
        columns = self.dataset.columns(names, first, last)
        used = np.repeat(chosen, index.lengths(first.index, last.index))
        if self.tasks is not None:
            listed = [number for number, text in self.dataset.tasks.items() if text in self.tasks]
            used &= np.isin(columns["task_index"][:, 0], listed)
        if self.frame_weights is not None:
            stored = columns[self.frame_weights][:, 0]
            with np.errstate(over="ignore"):
                weights = stored.astype(np.float32)  # as the losses are
            if (wrong := np.flatnonzero(used & ~((weights >= 0) & np.isfinite(weights)))).size:
                raise DataError(
                    f"{self.frame_weights} is {stored[wrong[0]]}, not a float32 number of 0 or more",
                    code="invalid_frame_weight",
                    where=f"{self.dataset.files}, frame {first.start + int(wrong[0])}",
                    remedy="correct the column, or weigh frames by another one",
                )
            used &= weights > 0
        return first.start + np.flatnonzero(used)


def content_digest(files: DatasetFiles, cache: DownloadCache) -> str:
    """Return the digest of a dataset's content.

    The digest of a local folder is cached until the name, size or time of one of its files changes.

    Raises:
        DataError: there is no dataset.
    """
    if not isinstance(files, LocalFiles):
        return files.digest()
    versions = "\n".join(files.version(name) for name in files.names())
    key = hashlib.sha256(f"{files}\n{versions}".encode()).hexdigest()
    cached = make_once(cache.folder / "digests" / key, lambda path: _put(files.digest(), path))
    return cached.read_text()


def _digest(files: DatasetFiles, cache: DownloadCache, like: str | None) -> str:
    """Return a digest of the same kind as `like`.

    That is the digest of the content, or, if `like` starts with `QUICK`, the digest of the file listing.

    Raises:
        DataError: there is no dataset.
    """
    if like is not None and like.partition(":")[0] == QUICK:
        return f"{QUICK}:{files.quick_digest()}"
    return content_digest(files, cache)


def pinned(settings: DatasetSettings) -> DatasetSettings:
    """Return the settings with the current commits and digests, so that a changed dataset gives another artifact.

    Raises:
        ConfigurationError: the settings have a digest, and the dataset has another one.
        DataError: there is no dataset.
    """
    sources = [_pinned(source) for source in settings.listed()]
    if settings.path is None:
        return settings.model_copy(update={"sources": tuple(sources)})
    return settings.model_copy(update={"revision": sources[0].revision, "digest": sources[0].digest})


def local_folder(settings: DatasetSettings) -> Path:
    """Return the folder of the only dataset.

    Raises:
        ConfigurationError: there are several datasets, or the dataset is not in a folder.
    """
    if settings.path is None or not (project_path(settings.path) / INFO).is_file():
        raise ConfigurationError(
            "statistics can only be put into a single dataset that is in a folder",
            code="dataset_not_in_folder",
            where="augment.in_place",
            remedy="set it to false, or set dataset.path to a folder",
        )
    return project_path(settings.path)


def refer(
    settings: DatasetSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> StageReport:
    """Write `dataset.json` with the location and digest of each dataset and how it is used."""
    sources = [_pinned(source) for source in settings.listed()]
    absolute = tuple(_absolute(source) for source in sources)
    _put(json.dumps(DatasetReference(sources=absolute).model_dump(), indent=1, sort_keys=True), folder / REFERENCE)
    opened = open_sources(folder)
    for each in opened:
        each.check_prompts()
    for source in sources:
        commit = f" at {source.revision}" if source.revision else ""
        context.events.message(f"dataset: refers to {source.path}{commit}, digest {source.digest}")
    return StageReport(rows=counted(opened))


DATASET_STAGE = Stage("dataset", 2, DatasetSettings, (), refer, resolve=lambda settings, inputs, say: pinned(settings))


def open_sources(artifact: Path) -> tuple[DatasetSource, ...]:
    """Open the datasets of an artifact: those it refers to, or the dataset recorded in it.

    Raises:
        ConfigurationError: a source names a feature or an episode that its dataset does not have.
        DataError: the artifact has no dataset, or a dataset has changed since the artifact was made.
    """
    if (artifact / RECORDED / INFO).is_file():
        path = str(artifact / RECORDED)
        return (_source(open_dataset(Path(path)), SourceSettings(path=path, tag=ALONE, weight=1.0)),)
    path = str(artifact / REFERENCE)
    try:
        reference = DatasetReference.model_validate_json(read_bytes(Path(path)))
    except FileNotFoundError as error:
        raise DataError("the artifact does not contain a dataset", code="not_a_dataset_artifact", where=path) from error
    cache = DownloadCache.standard()
    return tuple(_source(_opened(source, path, cache), source) for source in reference.sources)


def counted(sources: Sequence[DatasetSource]) -> dict[str, int]:
    """Return the number of episodes and frames that are used."""
    frames = sum(int(source.frames.stops[-1]) for source in sources)
    return {"episodes": sum(len(source.used_episodes()) for source in sources), "frames": frames}


def split(
    sources: Sequence[DatasetSource], held_out: float, seed: int
) -> tuple[tuple[DatasetSource, ...], tuple[DatasetSource, ...]]:
    """Split the episodes of each source. Return the sources for training and the sources for held-out episodes.

    Args:
        held_out: share of each dataset's episodes to hold out, rounded, at least one episode. Episodes without a frame
            that is used do not count. With 0 nothing is held out and the second tuple is empty.

    Raises:
        ConfigurationError: a dataset has too few episodes.
    """
    if held_out == 0:
        return tuple(sources), ()
    training, heldout = [], []
    for number, source in enumerate(sources):
        numbers = source.used_episodes()
        count = max(1, round(len(numbers) * held_out))
        if count >= len(numbers):
            raise ConfigurationError(
                f"{count} of {len(numbers)} episodes would be held out, which leaves none to train on",
                code="heldout_too_large",
                where=str(source.dataset.files),
                remedy="record more episodes, or hold out a smaller fraction",
            )
        chosen = np.sort(np.random.default_rng([seed, number]).permutation(len(numbers))[:count])
        training.append(replace(source, episodes=EpisodeSelection(np.delete(numbers, chosen))))
        heldout.append(replace(source, episodes=EpisodeSelection(numbers[chosen])))
    return tuple(training), tuple(heldout)


def _pinned(source: SourceSettings) -> SourceSettings:
    commit = hub_commit(source.path, source.revision, "dataset").commit if source.revision is not None else None
    cache = DownloadCache.standard()
    digest = _digest(open_files(project_source(source.path), commit, cache), cache, source.digest)
    if source.digest not in (None, QUICK, digest):
        raise ConfigurationError(
            f"the dataset has the digest {digest}, the settings have {source.digest!r}",
            code="dataset_digest_mismatch",
            where=f"{source.path} at {commit}" if commit else source.path,
            remedy="use the right dataset, or set digest to the actual value if this is the intended one",
        )
    return source.model_copy(update={"revision": commit, "digest": digest})


def _absolute(source: SourceSettings) -> SourceSettings:
    if source.revision is not None or "://" in source.path:
        return source
    here, cache = project_path(source.path).resolve(), DownloadCache.standard()
    lasting = original(here)  # `here` may be a copy that DVC will remove
    if (
        lasting != here
        and lasting.is_dir()
        and _digest(open_files(str(lasting), None, cache), cache, source.digest) == source.digest
    ):
        here = lasting
    return source.model_copy(update={"path": str(here)})


def _opened(source: SourceSettings, reference: str, cache: DownloadCache) -> Dataset:
    files = open_files(source.path, source.revision, cache)
    digest = _digest(files, cache, source.digest)
    if digest != source.digest:
        raise DataError(
            f"the dataset has changed: its digest is {digest}, not {source.digest}",
            code="dataset_changed",
            where=f"{source.path}, referred to by {reference}",
            remedy=f"restore the old files, or set dataset.digest to {digest} to use the new ones",
        )
    return open_dataset(files)


def _source(dataset: Dataset, settings: SourceSettings) -> DatasetSource:
    features, count = dataset.info.features, len(dataset.episodes)
    state = settings.state or (STATE if STATE in features else None)
    action = settings.action or ACTION
    images = {name: name for name, feature in features.items() if feature.is_visual}
    cameras = images if settings.cameras is None else settings.cameras
    for name in cameras.values():
        if not dataset.feature(name).is_visual:
            raise ConfigurationError(
                f"feature {name!r} is not a camera",
                code="feature_not_a_camera",
                where=str(dataset.files),
                remedy=f"choose cameras among {', '.join(images) or 'none: the dataset has no images'}",
            )
    episodes: Sequence[int] = range(count) if settings.episodes is None else sorted(set(settings.episodes))
    if not episodes or episodes[-1] >= count:
        chosen = f"episode {episodes[-1]}" if episodes else "no episode"
        raise ConfigurationError(
            f"{chosen} is selected of {count} episodes",
            code="unknown_episode",
            where=str(dataset.files),
            remedy=f"select episodes from 0 to {count - 1}",
        )
    # A dataset without the usual names can still be measured.
    for column in (state, settings.action, settings.frame_weights):
        if column is None:
            continue
        feature = dataset.feature(column)
        if not feature.is_number or (column == settings.frame_weights and feature.shape != (1,)):
            raise ConfigurationError(
                f"feature {column!r} is {feature.dtype} of the shape {list(feature.shape)}",
                code="feature_not_numeric",
                where=str(dataset.files),
                remedy="name a numeric feature, and for frame_weights one with a single number a frame",
            )
    if unknown := sorted(set(settings.tasks or ()) - set(dataset.tasks.values())):
        raise ConfigurationError(
            f"the dataset has no task {unknown[0]!r}",
            code="unknown_task",
            where=str(dataset.files),
            remedy=f"choose among {', '.join(map(repr, islice(dataset.tasks.values(), 20)))}",
        )
    if settings.prompt == SUBTASK:
        dataset.feature(PERSISTENT)
    return DatasetSource(
        dataset,
        settings.tag,
        settings.weight,
        settings.horizon,
        state,
        action,
        cameras,
        selection(episodes),
        settings.tasks,
        settings.frame_weights,
        settings.prompt,
    )


def _put(text: str, path: Path) -> None:
    path.write_text(text)
