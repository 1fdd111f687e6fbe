"""Files of a LeRobotDataset v3.0 or v3.1 and the content of `meta/info.json`."""

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
"""Version of the format that is written."""
READ = (VERSION, "v3.1")
"""Versions that are read. v3.1 may have language columns, see `language`."""
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEOS = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
IMAGE, VIDEO = "image", "video"
_PLACE = re.compile(r"\{(chunk_index|file_index|video_key)(?::0?(\d)d)?\}")


class Feature(BaseModel):
    """A column or a camera. `shape` is the shape of one frame."""

    model_config = ConfigDict(extra="allow", frozen=True)

    dtype: str
    shape: tuple[PositiveInt, ...]
    names: Any = None

    @property
    def is_visual(self) -> bool:
        """True for a camera."""
        return self.dtype in (IMAGE, VIDEO)

    @property
    def is_number(self) -> bool:
        """True for numbers and booleans."""
        return re.fullmatch(r"bool|u?int(8|16|32|64)|float(16|32|64)", self.dtype) is not None


OWN_FEATURES = {
    "timestamp": Feature(dtype="float32", shape=(1,)),
    **{name: Feature(dtype="int64", shape=(1,)) for name in ("frame_index", "episode_index", "index", "task_index")},
}
"""Columns that every dataset has in addition to its features."""


class DatasetInfo(BaseModel):
    """Content of `meta/info.json`. Unknown fields are preserved."""

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
        """Return the path of a data file in the dataset."""
        return place(self.data_path, chunk_index=chunk, file_index=file)

    def video_file(self, key: str, chunk: int, file: int) -> PurePosixPath:
        """Return the path of a video file in the dataset."""
        if self.video_path is None:
            raise DataError(
                f"feature {key!r} is a video, but video_path is not set", code="video_path_missing", where=INFO
            )
        return place(self.video_path, video_key=key, chunk_index=chunk, file_index=file)


def read_info(path: Path) -> DatasetInfo:
    """Read meta/info.json.

    Raises:
        DataError: the file is missing, has another version of the format, or has invalid values.
    """
    try:
        document = read_finite(read_bytes(path))
        version = document.get("codebase_version")
    except FileNotFoundError as error:
        raise DataError(
            "there is no LeRobot dataset: meta/info.json is missing",
            code="not_a_lerobot_dataset",
            where=str(path.parents[1]),
            remedy="give the folder of the dataset itself",
        ) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"the file is not a JSON object of finite numbers: {error}", code="invalid_json", where=str(path)
        ) from error
    if version not in READ:
        raise DataError(
            f"the dataset has version {version!r}, not {' or '.join(READ)}",
            code="dataset_version_unsupported",
            where=str(path),
            remedy="convert a v2.1 with lerobot's convert_dataset_v21_to_v30, or use a newer Armature",
        )
    try:
        info = DatasetInfo.model_validate(document)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise DataError(
            f"{key}: {problem['msg']} (value {problem['input']!r:.80})",
            code="invalid_dataset_info",
            where=str(path),
            remedy="correct the file, or fetch the dataset again",
        ) from error
    for name in OWN_FEATURES:
        if name not in info.features or not info.features[name].is_number:
            raise DataError(
                f"features.{name} is missing, or is not a number",
                code="feature_missing",
                where=str(path),
                remedy="every LeRobot dataset has this column: add it, or record or convert the dataset again",
            )
    return info


def read_stats(path: Path) -> dict[str, Any]:
    """Read meta/stats.json.

    Raises:
        DataError: the file is not a JSON object of finite numbers.
    """
    try:
        document: dict[str, Any] = dict(read_finite(read_bytes(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"the file is not a JSON object of finite numbers: {error}",
            code="invalid_json",
            where=str(path),
            remedy="remove the file, or compute it again with quantile-stats",
        ) from error
    return document


def place(template: str, **values: str | int) -> PurePosixPath:
    """Return a path `template` of info.json with its placeholders filled in: a path inside the dataset.

    Only the three known placeholders are replaced, so a template cannot access attributes of objects. Symbolic links
    are followed when the file is opened, because a hub's cache consists of them.

    Raises:
        DataError: the template has an unknown placeholder, or the path leaves the dataset.

    Example:
        >>> place("data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", chunk_index=0, file_index=7)
        PurePosixPath('data/chunk-000/file-007.parquet')
    """

    def fill(match: re.Match[str]) -> str:
        name, width = match.groups()
        if name not in values:
            raise DataError(f"{template!r} has a placeholder {name}", code="unknown_path_place", where=INFO)
        return str(values[name]).zfill(int(width or 0))

    text = _PLACE.sub(fill, template)
    where = f"{INFO}: {template!r}"
    if "{" in text:
        raise DataError(
            f"the path {text!r} has an unknown placeholder",
            code="unsafe_file_name",
            where=where,
        )
    return confined(text, where)


# --- Access to the files of a dataset, in a folder or remote ---


class DatasetFiles(Protocol):
    """Files of one dataset, by their paths within it. Can be pickled, so that other processes open the same files.

    Example:
        >>> def read_tasks(files: DatasetFiles) -> bytes:
        ...     return files.path("meta/tasks.parquet").read_bytes()
    """

    @property
    def root(self) -> Path:
        """Folder of the dataset's files. For a remote dataset, the folder that its files are downloaded to."""

    def names(self, part: str = "") -> list[str]:
        """Return the sorted paths of the dataset's files, or only of the files in folder `part`.

        meta/stats.json is not included.
        """

    def has(self, name: str | PurePosixPath) -> bool:
        """Return True if the file exists."""

    def path(self, name: str | PurePosixPath) -> Path:
        """Return the file's path on this machine, after downloading it if needed. In a folder it may not exist.

        Raises:
            DataError: the file cannot be downloaded.
        """

    def view(self, name: str | PurePosixPath, whole: bool) -> AbstractContextManager[Path | IO[bytes]]:
        """Open the file for reading.

        Reading a remote file downloads only the parts that are read. With `whole` the complete file is downloaded
        first, which is better if all of it will be read sooner or later.

        Raises:
            DataError: the file cannot be reached, or has changed.
        """

    def version(self, name: str | PurePosixPath) -> str:
        """Return a string that identifies the file and its content, without downloading it."""

    def digest(self) -> str:
        """Return the SHA-256 of the dataset's content, without meta/stats.json, which is computed from the rest."""

    def quick_digest(self) -> str:
        """Return a SHA-256 that reads no data and no video.

        It covers the content of the files in meta/. For all other files it covers the name, the size, and the
        modification time or ETag, so a change that keeps a file's size and time is not detected.
        """


def belongs(name: str) -> bool:
    """Return True if a file of that name is part of a dataset's content."""
    tables = name.startswith(("meta/episodes/", "data/")) and name.endswith(".parquet")
    return name in (INFO, TASKS) or tables or (name.startswith("videos/") and name.endswith(".mp4"))


@dataclass(frozen=True)
class LocalFiles:
    """Files of a dataset in a local folder."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def names(self, part: str = "") -> list[str]:
        folders = [self.root / each for each in ([part] if part else ["meta", "data", "videos"])]
        walked = (entry for folder in folders for entry in os.walk(folder))
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
        """Return the file's path and its state on disk, without reading it; see `DatasetFiles.version`.

        Raises:
            DataError: the file does not exist.
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
        """Return the SHA-256 of the content.

        Raises:
            DataError: there is no dataset.
        """
        return self._digest(lambda name: _sha256(self.root / name))

    def quick_digest(self) -> str:
        """Return the SHA-256 of the listing, see `DatasetFiles.quick_digest`.

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
                "there is no LeRobot dataset: meta/info.json is missing",
                code="not_a_lerobot_dataset",
                where=str(self.root),
            )
        with ThreadPoolExecutor() as executor:
            digests = executor.map(of, names)
            return listing_digest(dict(zip(names, digests, strict=True)))


def _sha256(path: Path) -> str:
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
