"""The files of a LeRobotDataset v3.0 and what `meta/info.json` says of them."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import read_bytes
from armature.components.contracts.names import confined
from armature.components.contracts.numbers import read_finite

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
