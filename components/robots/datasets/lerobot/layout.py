"""The files of a LeRobotDataset v3.0 and what `meta/info.json` says of them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from armature.components.artifacts.cache import file_sha256, file_state
from armature.components.artifacts.fetched import listing_digest
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import confined, read_bytes, regular
from armature.components.contracts.metrics import read_finite

VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEOS = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
IMAGE, VIDEO = "image", "video"
_PLACE = re.compile(r"\{(chunk_index|file_index|video_key)(?::0?(\d)d)?\}")


class Feature(BaseModel):
    """One column, or one camera; `shape` is of a frame."""

    model_config = ConfigDict(extra="allow", frozen=True)

    dtype: str
    shape: tuple[PositiveInt, ...]
    names: Any = None

    @property
    def is_visual(self) -> bool:
        return self.dtype in (IMAGE, VIDEO)

    @property
    def is_number(self) -> bool:
        return re.fullmatch(r"bool|u?int(8|16|32|64)|float(16|32|64)", self.dtype) is not None


OWN_FEATURES = {
    "timestamp": Feature(dtype="float32", shape=(1,)),
    **{name: Feature(dtype="int64", shape=(1,)) for name in ("frame_index", "episode_index", "index", "task_index")},
}
"""Columns that every dataset has besides its own."""


class DatasetInfo(BaseModel):
    """`meta/info.json`; what this version does not know is kept."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    codebase_version: str
    fps: PositiveFloat
    robot_type: str | None = None
    total_episodes: NonNegativeInt
    total_frames: NonNegativeInt
    total_tasks: NonNegativeInt
    chunks_size: PositiveInt = 1000
    data_path: str = DATA
    video_path: str | None = None
    features: dict[str, Feature] = Field(min_length=1)

    def data_file(self, chunk: int, file: int) -> PurePosixPath:
        return place(self.data_path, chunk_index=chunk, file_index=file)

    def video_file(self, key: str, chunk: int, file: int) -> PurePosixPath:
        if self.video_path is None:
            raise DataError(
                f"feature {key!r} is a video and there is no video_path", code="video_path_missing", where=INFO
            )
        return place(self.video_path, video_key=key, chunk_index=chunk, file_index=file)


def read_info(path: Path) -> DatasetInfo:
    """
    Raises:
        DataError: no such file, another version of the layout, or values that cannot be.
    """
    try:
        document = read_finite(read_bytes(path))
        version = document.get("codebase_version")
    except FileNotFoundError as error:
        raise DataError(
            "not a LeRobot dataset: it has no meta/info.json",
            code="not_a_lerobot_dataset",
            where=str(path.parents[1]),
            remedy="give the dataset's own folder",
        ) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"not a JSON object of finite numbers: {error}", code="invalid_json", where=str(path)
        ) from error
    if version != VERSION:
        raise DataError(
            f"the dataset is of version {version!r}, not {VERSION!r}",
            code="dataset_version_unsupported",
            where=str(path),
            remedy="convert it with lerobot's convert_dataset_v21_to_v30",
        )
    try:
        info = DatasetInfo.model_validate(document)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise DataError(
            f"{key}: {problem['msg']} (given {problem['input']!r:.80})", code="invalid_dataset_info", where=str(path)
        ) from error
    for name in OWN_FEATURES:
        if name not in info.features or not info.features[name].is_number:
            raise DataError(
                f"features.{name} is missing, or is not a number",
                code="feature_missing",
                where=str(path),
                remedy="every LeRobot dataset has this column; describe it, or record or convert the dataset again",
            )
    return info


def read_stats(path: Path) -> dict[str, Any]:
    """Read meta/stats.json.

    Raises:
        DataError: it is not a JSON object of finite numbers.
    """
    try:
        document: dict[str, Any] = dict(read_finite(read_bytes(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"not a JSON object of finite numbers: {error}",
            code="invalid_json",
            where=str(path),
            remedy="remove the file, or compute it again with quantile-stats",
        ) from error
    return document


def place(template: str, **values: str | int) -> PurePosixPath:
    """`template` of info.json with its places filled in: a path inside the dataset.

    Only the three known places are filled, so a template cannot reach into objects. Symbolic links are followed
    when the file is opened, since a hub's cache consists of them.

    Raises:
        DataError: an unknown place, or the path leaves the dataset.
    """

    def fill(match: re.Match[str]) -> str:
        name, width = match.groups()
        if name not in values:
            raise DataError(f"{template!r} has a place for {name}", code="unknown_path_place", where=INFO)
        return str(values[name]).zfill(int(width or 0))

    text = _PLACE.sub(fill, template)
    where = f"{INFO}: {template!r}"
    if "{" in text:
        raise DataError(
            f"the path {text!r} does not stay in the dataset: it has another place",
            code="unsafe_file_name",
            where=where,
        )
    return confined(text, where)


# Where the files of a dataset are: in a folder, or wherever they can be fetched from.


class DatasetFiles(Protocol):
    """The files of one dataset, named by their paths in it. Pickles: other processes open the same files."""

    @property
    def root(self) -> Path:
        """The folder that holds them, or those that were fetched."""

    def names(self, part: str = "") -> list[str]:
        """All files that a dataset consists of, or those below `part`, sorted; meta/stats.json is not among them."""

    def has(self, name: str | PurePosixPath) -> bool: ...

    def path(self, name: str | PurePosixPath) -> Path:
        """The file on this machine, fetched where it is not yet; it need not exist in a folder.

        Raises:
            DataError: it cannot be fetched.
        """

    def view(self, name: str | PurePosixPath, whole: bool) -> AbstractContextManager[Path | IO[bytes]]:
        """The file for reading. What is not on this machine is fetched as far as it is read, or if it is going to be
        read as a `whole`, by anyone and in time, completely.

        Raises:
            DataError: it cannot be reached, or is not what it was.
        """

    def version(self, name: str | PurePosixPath) -> str:
        """Names the file and its content; needs no fetching."""

    def digest(self) -> str:
        """SHA-256 of what is in the dataset, without meta/stats.json, which is computed from the rest."""

    def quick_digest(self) -> str:
        """SHA-256 of what is listed: of files in meta/ the content, of others name, size, and time or ETag.

        Reads no data and no video. Who changes a file and keeps its size and time is not seen.
        """


def belongs(name: str) -> bool:
    """Whether a file of that name is part of a dataset's content."""
    tables = name.startswith(("meta/episodes/", "data/")) and name.endswith(".parquet")
    return name in (INFO, TASKS) or tables or (name.startswith("videos/") and name.endswith(".mp4"))


@dataclass(frozen=True)
class LocalFiles:
    """Files in a folder of this machine."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def names(self, part: str = "") -> list[str]:
        folders = [self.root / each for each in ([part] if part else ["meta", "data", "videos"])]
        walked = (found for folder in folders for found in os.walk(folder))
        paths = (f"{folder}/{name}" for folder, _, names in walked for name in names)
        names = (path[len(str(self.root)) + 1 :] for path in paths)
        return sorted(name for name in names if belongs(name))

    def has(self, name: str | PurePosixPath) -> bool:
        return (self.root / name).is_file()

    def path(self, name: str | PurePosixPath) -> Path:
        return self.root / name

    def view(self, name: str | PurePosixPath, whole: bool) -> AbstractContextManager[Path | IO[bytes]]:
        return nullcontext(regular(self.root / name))

    def version(self, name: str | PurePosixPath) -> str:
        """By the times that the file was changed, which costs no reading.

        Raises:
            DataError: there is no such file.
        """
        path = (self.root / name).resolve()
        try:
            return f"{path}\0{file_state(path)}"
        except OSError as error:
            raise DataError(
                f"the file cannot be read: {error.strerror}",
                code="data_file_unreadable",
                where=str(self.root / name),
                remedy="fetch it again",
            ) from error

    def digest(self) -> str:
        """
        Raises:
            DataError: there is no dataset.
        """
        return self._digest(lambda name: _sha256(self.root / name))

    def quick_digest(self) -> str:
        """
        Raises:
            DataError: there is no dataset.
        """
        return self._digest(self._listed)

    def _listed(self, name: str) -> str:
        if name.startswith("meta/"):
            return file_sha256(self.root / name)
        state = (self.root / name).stat()
        return f"{state.st_size} {state.st_mtime_ns}"

    def _digest(self, of: Callable[[str], str]) -> str:
        names = self.names()
        if INFO not in names:
            raise DataError(
                "not a LeRobot dataset: it has no meta/info.json", code="not_a_lerobot_dataset", where=str(self.root)
            )
        with ThreadPoolExecutor() as executor:
            digests = executor.map(of, names)
            return listing_digest(dict(zip(names, digests, strict=True)))


def _sha256(path: Path) -> str:
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
