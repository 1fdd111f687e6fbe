"""Images and videos in tables: bytes, {bytes, path} as Hugging Face writes them, base64, data URLs, paths of files, or
for videos {frames, times}."""

from __future__ import annotations

import json
from base64 import b64decode
from binascii import Error as Base64Error
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from armature.components.artifacts.images import MAX_BYTES, check_image_header, decode
from armature.components.artifacts.videos import (
    VIDEO_HEAD,
    FrameSettings,
    choose_frames,
    frame_times,
    is_video,
    read_video,
)
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import EncodedImage
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.files import DataFiles
from armature.components.environments.dataset.shards import READERS, Row, Shard

# --- A folder of images as a table: rows from metadata files, or classes from folder names ---

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
METADATA = {f"metadata.{kind}": kind for kind in ("jsonl", "csv", "parquet")}
FILE_NAME, IMAGE, LABEL = "file_name", "image", "label"


class ClassFolder:
    """A shard with one row per image of a folder: `image` is the image's path, `label` the folder's name."""

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self.name, self._names = folder, names
        self.columns = {IMAGE, LABEL}

    def scan(self, wanted: Collection[str]) -> Iterator[Row | BadRow]:
        return (self.row(index) for index in range(len(self._names)))

    def row(self, index: int) -> Row:
        if not 0 <= index < len(self._names):
            raise DataError(f"there is no image {index} of {len(self._names)}", code="row_missing", where=self.name)
        return {IMAGE: self._names[index], LABEL: PurePosixPath(self.name).name}


class MetadataFolder:
    """A shard with the rows of a metadata file. Its column `file_name` gives images relative to the file's folder.

    Each image in that folder that no row names counts as a bad row.
    """

    def __init__(self, rows: Shard, names: Collection[str]) -> None:
        self.name, self._rows, self._names = rows.name, rows, set(names)
        self._folder = PurePosixPath(rows.name).parent

    @property
    def columns(self) -> set[str]:
        return {*self._rows.columns, IMAGE}

    def scan(self, wanted: Collection[str]) -> Iterator[Row | BadRow]:
        left = set(self._names)
        for row in self._rows.scan({*wanted, FILE_NAME}):
            if isinstance(row, dict):
                row = self._with_image(row)
                left.discard(str(row[IMAGE]))
            yield row
        yield from (BadRow("no_metadata", f"{name} is not in {self.name}") for name in sorted(left))

    def row(self, index: int) -> Row:
        return self._with_image(self._rows.row(index))

    def _with_image(self, row: Row) -> Row:
        name: Any = row.get(FILE_NAME)
        return {**row, IMAGE: str(self._folder / name) if isinstance(name, str) and name else name}


def image_shards(files: DataFiles) -> list[Shard]:
    """Return the shards of a folder of images: one per metadata file, and one per other folder that has images.

    Raises:
        DataError: there are no images.
    """
    names = files.names()
    described = {str(PurePosixPath(name).parent): name for name in names if PurePosixPath(name).name in METADATA}
    images: dict[str, list[str]] = defaultdict(list)
    for name in names:
        path = PurePosixPath(name)
        if path.suffix.lower() in SUFFIXES:
            above = (str(folder) for folder in path.parents)
            images[next((folder for folder in above if folder in described), str(path.parent))].append(name)
    if not images:
        raise DataError("the folder has no PNG, JPEG or WebP files", code="images_missing", where=str(files))
    shards: list[Shard] = []
    for folder in sorted(images.keys() | described.keys()):
        if folder in described:
            table = described[folder]
            rows = READERS[METADATA[PurePosixPath(table).name]](files.path(table), table)
            shards.append(MetadataFolder(rows, images[folder]))
        else:
            shards.append(ClassFolder(folder, images[folder]))
    return shards


# --- The images of a row ---

BASE64 = ("iVBORw0KGgo", "/9j/", "UklGR")
"""First characters of PNG, JPEG and WebP files in base64."""
LONGEST_PATH = 4096
"""Largest number of characters in the path of an image."""


@dataclass(frozen=True, slots=True)
class TableImage:
    """An image or a video of a row.

    If `data` is None, `path` names a file; otherwise `data` are the image's bytes from the table. `path` is then only a
    label that the table carries. A video may be images instead, its `frames`, with their `times` in seconds.
    """

    path: str | None
    data: bytes | None
    frames: tuple[TableImage, ...] = ()
    times: tuple[float, ...] = ()

    @property
    def embedded(self) -> bool:
        """True if the table has the image's bytes, or bytes of its frames."""
        return any(each.data is not None for each in self.frames or (self,))

    @property
    def files(self) -> Iterator[str]:
        """The paths of the image's file, or of the files of its frames."""
        for each in self.frames or (self,):
            if each.path and each.data is None:
                yield each.path

    @property
    def reference(self) -> dict[str, Any]:
        """The image's part of the row's digest: the SHA-256 of bytes in the table, or the path of a file."""
        if self.frames:
            return {"frames": [each.reference for each in self.frames], "times": self.times}
        return {"path": self.path or ""} if self.data is None else {"sha256": sha256(self.data).hexdigest()}

    def check_present(self, files: DataFiles) -> None:
        """Check that the image's file exists.

        Raises:
            BadRow: the path leaves the folder, or there is no such file.
        """
        for each in self.frames or (self,):
            if each.data is None:
                _present(each.path, files)

    def check(self, files: DataFiles) -> None:
        """Check that the image or video can be opened; its pixels are not decoded.

        Raises:
            BadRow: it cannot.
        """
        for each in self.frames or (self,):
            source = each.source(files)
            try:
                if isinstance(source, EncodedImage):
                    check_image_header(source)
                else:
                    frame_times(source)
            except DataError as error:
                reason = "bad_image" if isinstance(source, EncodedImage) else "bad_video"
                raise BadRow(reason, f"{each.path or 'an image'}: {error.what}") from error

    def load(self, files: DataFiles, settings: FrameSettings) -> EncodedImage:
        """Return the image's bytes with the media type that their first bytes show, or a video's frames.

        Raises:
            BadRow: there is no such file, its bytes are of none of the known formats, or a video is damaged.
        """
        try:
            if self.frames:
                frames = [decode(each.load(files, settings)) for each in self.frames]
                return choose_frames(frames, self.times, settings)
            source = self.source(files)
            return source if isinstance(source, EncodedImage) else read_video(source, settings)
        except DataError as error:
            raise BadRow("bad_video", f"{self.path or 'a video'}: {error.what}") from error

    def source(self, files: DataFiles) -> EncodedImage | bytes | Path:
        """Return the image, or the bytes or the file of a video.

        Raises:
            BadRow: there is no such file, or its bytes are of none of the known formats.
        """
        data = self.data
        if data is None:
            name = _present(self.path, files)
            try:
                path = files.path(name)
                with path.open("rb") as file:
                    data = file.read(VIDEO_HEAD)
                    if is_video(data):
                        return path
                    data += file.read(MAX_BYTES + 1)
                if len(data) > MAX_BYTES:
                    raise BadRow("bad_image", f"{name}: more than {MAX_BYTES} bytes")
            except (DataError, OSError) as error:
                raise BadRow("no_image", f"{name}: {error}") from error
        return data if is_video(data) else encoded_image(data, self.path or "an image")


def table_images(value: Any, column: str) -> list[TableImage]:
    """Return the images and videos in a column's value: one or a list.

    Raises:
        BadRow: an image is null or has another type.

    Example:
        >>> [(each.path, each.data) for each in table_images(["cat.png", {"bytes": b"...", "path": None}], "image")]
        [('cat.png', None), (None, b'...')]
    """
    is_list = isinstance(value, str) and value.startswith("[")
    if is_list and PurePosixPath(value).suffix.lower() not in SUFFIXES:  # "[v2]/0.png" is a path
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow("wrong_type", f"{column!r} begins like a JSON list and is not one") from None
    return [_image(each, column) for each in (value if isinstance(value, list | tuple) else [value])]


def _image(value: Any, column: str) -> TableImage:
    if isinstance(value, dict) and "frames" in value:
        frames, times = value["frames"], value.get("times")
        if not isinstance(frames, list | tuple) or not isinstance(times, list | tuple) or not frames:
            raise BadRow("wrong_type", f"{column!r} has frames or times that are not lists")
        if not all(isinstance(time, int | float) for time in times):
            raise BadRow("wrong_type", f"{column!r} has times that are not numbers: {times!r:.80}")
        return TableImage(None, None, tuple(_image(frame, column) for frame in frames), tuple(map(float, times)))
    if isinstance(value, dict):
        data, path = value.get("bytes"), value.get("path")
        if isinstance(data, str):
            data = from_base64(data, column)
        if not isinstance(data, bytes | None) or not isinstance(path, str | None):
            raise BadRow("wrong_type", f"{column!r} holds neither bytes nor a path")
        if data is None and not path:
            raise BadRow("no_image", f"{column!r} has neither bytes nor a path")
        return TableImage(path or None, data)
    if value is None or value in ("", b""):
        raise BadRow("no_image", f"{column!r} is null")
    if isinstance(value, bytes):
        return TableImage(None, value)
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{column!r} is {type(value).__name__}, not an image")
    if value.startswith("data:"):
        try:
            return TableImage(None, EncodedImage.from_url(value).data)
        except DataError as error:
            raise BadRow("bad_image", f"{column!r}: {error.what}") from error
    if value.startswith(BASE64):
        return TableImage(None, from_base64(value, column))
    return TableImage(value, None)


def from_base64(text: str, column: str) -> bytes:
    """Decode base64, in which white space is ignored.

    Raises:
        BadRow: the base64 is damaged (`bad_image`).
    """
    try:
        return b64decode("".join(text.split()), validate=True)
    except (Base64Error, ValueError) as error:
        raise BadRow("bad_image", f"{column!r}: the base64 is damaged: {error}") from error


def _present(path: str | None, files: DataFiles) -> str:
    name = path or ""
    if "://" in name[:16]:
        raise BadRow("bad_path", f"{name[:200]!r} is a URL; images are not downloaded, give the file itself")
    if len(name) > LONGEST_PATH:
        raise BadRow("bad_path", f"a path of {len(name)} characters")
    try:
        exists = files.has(name)
    except (DataError, ValueError) as error:
        raise BadRow("bad_path", error.what if isinstance(error, DataError) else f"{name[:200]!r}: {error}") from error
    if not exists:
        raise BadRow("no_image", f"there is no file {name[:200]!r} in {files}")
    return name


def encoded_image(data: bytes, name: str) -> EncodedImage:
    """Return the bytes of a file as an image, with the media type that the first bytes show.

    Raises:
        BadRow: the file is neither PNG, JPEG nor WebP (`bad_image`).
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return EncodedImage(data, "image/png")
    if data.startswith(b"\xff\xd8\xff"):
        return EncodedImage(data, "image/jpeg")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return EncodedImage(data, "image/webp")
    raise BadRow("bad_image", f"{name[:200]}: neither PNG, JPEG, WebP nor a video")
