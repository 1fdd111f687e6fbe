"""Datasets as an artifact: references to folders, hub names or URLs, by the digest of what is in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

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
from armature.components.robots.datasets.lerobot.layout import INFO, DatasetFiles, LocalFiles
from armature.components.robots.datasets.lerobot.reader import Dataset, open_dataset
from armature.components.robots.datasets.quantiles import Array
from armature.components.robots.datasets.remote import RECORDED, open_files
from armature.components.robots.datasets.settings import ALONE, QUICK, DatasetSettings, SourceSettings

# Which episodes of a dataset are used.


class EpisodeSelection(Sequence[int]):
    """Ascending numbers of episodes, kept as runs of consecutive ones: memory is by run, not by episode."""

    def __init__(self, numbers: Sequence[int] | Array) -> None:
        """
        Args:
            numbers: Ascending, none twice.
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
        return self._firsts.nbytes + self._ends.nbytes

    def numbers(self) -> Array:
        """All of them: int64 (episodes,)."""
        return np.repeat(self._firsts - self._ends + self._counts, self._counts) + np.arange(len(self))

    def between(self, first: int, last: int) -> Array:
        """Those from `first` to `last`, both included: int64 (episodes,)."""
        ends = self._firsts + self._counts
        runs = range(int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(self._firsts, last, "right")))
        spans = [np.arange(max(first, self._firsts[run]), min(last + 1, ends[run])) for run in runs]
        return np.concatenate([np.zeros(0, np.int64), *spans])

    def frames(self, index: EpisodeIndex) -> tuple[Array, Array]:
        """Of each run the dataset's first frame, and the selection's frames until the run's end."""
        stops = index.numbers["stop"]
        firsts = np.where(self._firsts > 0, stops[self._firsts - 1], 0)
        return firsts, np.cumsum(stops[self._firsts + self._counts - 1] - firsts)

    def before(self, frames: Array, index: EpisodeIndex) -> Array:
        """How many frames of the selection come before each of these of the dataset: (frames,)."""
        firsts, stops = self.frames(index)
        run = np.maximum(np.searchsorted(firsts, frames, side="right") - 1, 0)
        begins = np.concatenate([[0], stops])[run]
        return begins + np.clip(frames - firsts[run], 0, stops[run] - begins)


def selection(numbers: Sequence[int]) -> EpisodeSelection:
    """The numbers, ascending, as runs."""
    return numbers if isinstance(numbers, EpisodeSelection) else EpisodeSelection(numbers)


REFERENCE = "dataset.json"
STATE, ACTION = "observation.state", "action"


class DatasetReference(BaseModel):
    """What a dataset artifact holds instead of gigabytes; every source has its digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: tuple[SourceSettings, ...]


@dataclass(frozen=True)
class DatasetSource:
    """A dataset, and how a policy is to see it: see `SourceSettings`. `cameras` are in the policy's order.

    `episodes` are ascending.
    """

    dataset: Dataset
    tag: str
    weight: float
    horizon: int | None
    state: str | None
    action: str
    cameras: Mapping[str, str]
    episodes: Sequence[int]


def content_digest(files: DatasetFiles, cache: DownloadCache) -> str:
    """The files' digest; that of a folder is kept for as long as names, sizes and times of its files stay.

    Raises:
        DataError: there is no dataset.
    """
    if not isinstance(files, LocalFiles):
        return files.digest()
    versions = "\n".join(files.version(name) for name in files.names())
    key = hashlib.sha256(f"{files}\n{versions}".encode()).hexdigest()
    kept = make_once(cache.folder / "digests" / key, lambda path: _put(files.digest(), path))
    return kept.read_text()


def _digest(files: DatasetFiles, cache: DownloadCache, like: str | None) -> str:
    """Of the same kind as `like`: of the content, or with the word `QUICK` before it, of what is listed.

    Raises:
        DataError: there is no dataset.
    """
    if like is not None and like.partition(":")[0] == QUICK:
        return f"{QUICK}:{files.quick_digest()}"
    return content_digest(files, cache)


def pinned(settings: DatasetSettings) -> DatasetSettings:
    """With commits and digests of what is there now, so that a changed dataset is another artifact.

    Raises:
        ConfigurationError: the settings name another digest.
        DataError: there is no dataset.
    """
    found = [_pinned(source) for source in settings.listed()]
    if settings.path is None:
        return settings.model_copy(update={"sources": tuple(found)})
    return settings.model_copy(update={"revision": found[0].revision, "digest": found[0].digest})


def local_folder(settings: DatasetSettings) -> Path:
    """Of the only dataset.

    Raises:
        ConfigurationError: there are several, or it is not in a folder.
    """
    if settings.path is None or not (project_path(settings.path) / INFO).is_file():
        raise ConfigurationError(
            "statistics can be put into one dataset in a folder alone",
            code="dataset_not_in_folder",
            where="augment.in_place",
            remedy="set it to false, or give dataset.path a folder",
        )
    return project_path(settings.path)


def refer(
    settings: DatasetSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> StageReport:
    """`dataset.json`: where each dataset is, the digest of its content, and how it is to be seen."""
    sources = [_pinned(source) for source in settings.listed()]
    found = [_absolute(source) for source in sources]
    _put(json.dumps(DatasetReference(sources=tuple(found)).model_dump(), indent=1, sort_keys=True), folder / REFERENCE)
    opened = open_sources(folder)
    for source in sources:
        commit = f" at {source.revision}" if source.revision else ""
        context.events.message(f"dataset: refers to {source.path}{commit}, digest {source.digest}")
    return StageReport(rows=counted(opened))


DATASET_STAGE = Stage("dataset", 2, DatasetSettings, (), refer, resolve=lambda settings, inputs, say: pinned(settings))


def open_sources(artifact: Path) -> tuple[DatasetSource, ...]:
    """The datasets of an artifact: those that it refers to, or the one that was recorded into it.

    Raises:
        ConfigurationError: a source names a feature or an episode that its dataset does not have.
        DataError: no such artifact, or a dataset has changed since.
    """
    if (artifact / RECORDED / INFO).is_file():
        path = str(artifact / RECORDED)
        return (_source(open_dataset(Path(path)), SourceSettings(path=path, tag=ALONE, weight=1.0)),)
    path = str(artifact / REFERENCE)
    try:
        reference = DatasetReference.model_validate_json(read_bytes(Path(path)))
    except FileNotFoundError as error:
        raise DataError(
            "not an artifact of a stage that gives a dataset", code="not_a_dataset_artifact", where=path
        ) from error
    cache = DownloadCache.standard()
    return tuple(_source(_opened(source, path, cache), source) for source in reference.sources)


def counted(sources: Sequence[DatasetSource]) -> dict[str, int]:
    """Episodes and frames that are used."""
    frames = [selection(source.episodes).frames(source.dataset.episodes)[1][-1] for source in sources]
    return {"episodes": sum(len(source.episodes) for source in sources), "frames": int(sum(frames))}


def split(
    sources: Sequence[DatasetSource], held_out: float, seed: int
) -> tuple[tuple[DatasetSource, ...], tuple[DatasetSource, ...]]:
    """The sources with the episodes to train on, and with those that are held out.

    Args:
        held_out: Share of each dataset's episodes, rounded, at least one; 0 holds out none, and gives no sources.

    Raises:
        ConfigurationError: a dataset has too few episodes.
    """
    if held_out == 0:
        return tuple(sources), ()
    training, kept = [], []
    for number, source in enumerate(sources):
        count = max(1, round(len(source.episodes) * held_out))
        if count >= len(source.episodes):
            raise ConfigurationError(
                f"{count} of {len(source.episodes)} episodes would be held out",
                code="heldout_too_large",
                where=str(source.dataset.files),
                remedy="record more episodes, or hold out a smaller share",
            )
        chosen = np.sort(np.random.default_rng([seed, number]).permutation(len(source.episodes))[:count])
        numbers = selection(source.episodes).numbers()
        training.append(replace(source, episodes=EpisodeSelection(np.delete(numbers, chosen))))
        kept.append(replace(source, episodes=EpisodeSelection(numbers[chosen])))
    return tuple(training), tuple(kept)


def _pinned(source: SourceSettings) -> SourceSettings:
    commit = hub_commit(source.path, source.revision, "dataset").commit if source.revision is not None else None
    cache = DownloadCache.standard()
    digest = _digest(open_files(project_source(source.path), commit, cache), cache, source.digest)
    if source.digest not in (None, QUICK, digest):
        raise ConfigurationError(
            f"the dataset has the digest {digest}, the settings say {source.digest!r}",
            code="dataset_digest_mismatch",
            where=f"{source.path} at {commit}" if commit else source.path,
            remedy="give the right one, or set digest to the actual value if this is the dataset that you mean",
        )
    return source.model_copy(update={"revision": commit, "digest": digest})


def _absolute(source: SourceSettings) -> SourceSettings:
    if source.revision is not None or "://" in source.path:
        return source
    here, cache = project_path(source.path).resolve(), DownloadCache.standard()
    lasting = original(here)  # DVC removes its copies
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
            remedy=f"put the old files back, or set dataset.digest to {digest} to take the new ones",
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
                f"feature {name!r} is not a camera", code="feature_not_a_camera", where=str(dataset.files)
            )
    episodes: Sequence[int] = range(count) if settings.episodes is None else sorted(set(settings.episodes))
    if not episodes or episodes[-1] >= count:
        chosen = episodes[-1] if episodes else "no episode"
        raise ConfigurationError(
            f"{chosen} is chosen of {count} episodes", code="unknown_episode", where=str(dataset.files)
        )
    for name in filter(None, (state, settings.action)):  # a dataset without the usual names can still be measured
        if not dataset.feature(name).is_number:
            raise ConfigurationError(
                f"feature {name!r} is {dataset.feature(name).dtype}",
                code="feature_not_numeric",
                where=str(dataset.files),
            )
    return DatasetSource(
        dataset, settings.tag, settings.weight, settings.horizon, state, action, cameras, selection(episodes)
    )


def _put(text: str, path: Path) -> None:
    path.write_text(text)
