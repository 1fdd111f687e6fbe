"""The images that the tables of one artifact show, in one ZIP archive that belongs to this artifact alone."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from armature.components.artifacts.images import FORMATS, MAX_BYTES, ImageStore
from armature.components.artifacts.tables import IMAGE_REF
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef

PART_BYTES = 64 * 2**20
"""Unpacked images that are kept together: the disk is waited for once."""
_NAME = re.compile(r"([0-9a-f]{64})\.(png|jpeg|webp)")
_DATE = (1980, 1, 1, 0, 0, 0)
_MEDIA_TYPES = {name.lower(): media_type for media_type, name in FORMATS.items()}


def image_refs(folder: Path) -> list[ImageRef]:
    """The images that the tables in `folder` refer to, each once, without their sizes."""
    seen: set[tuple[str, str]] = set()
    for path in sorted(folder.rglob("*.parquet")):
        columns = [field.name for field in pq.read_schema(path) if _shows_images(field.type)]
        for column in pq.read_table(path, columns=columns).columns if columns else ():
            rows = pc.list_flatten(column)
            digests, kinds = (pc.struct_field(rows, name).to_pylist() for name in ("sha256", "media_type"))
            seen.update(zip(digests, kinds, strict=True))
    return [ImageRef(digest, kind, 0, 0) for digest, kind in sorted(seen)]


def _shows_images(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and kind.value_type == IMAGE_REF


def write_archive(images: ImageStore, refs: Iterable[ImageRef], target: Path, say: Callable[[str], None]) -> None:
    """Write the images uncompressed, under the names that they have in the image store. Those that are gone are said.

    Equal references give equal bytes.
    """
    missing = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for ref in refs:
            try:
                archive.writestr(zipfile.ZipInfo(images.path(ref).name, _DATE), images.read(ref))
            except DataError as error:
                missing.append(error.what)
    if missing:
        say(f"the remote store gets {len(missing)} images less than its tables name: {missing[0]}")


def unpack_archive(archive: Path, images: ImageStore, where: str) -> None:
    """Put the images of an archive that are not there yet into the image store.

    Raises:
        DataError: the archive is damaged, or holds something else than images; `where` is its address.
    """
    part: dict[ImageRef, bytes] = {}
    size = 0
    try:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                matched = _NAME.fullmatch(member.filename)
                if not matched or member.compress_type != zipfile.ZIP_STORED or member.file_size > MAX_BYTES:
                    raise DataError(f"not an image: {member.filename!r}")
                ref = ImageRef(matched[1], _MEDIA_TYPES[matched[2]], 0, 0)
                if images.path(ref).exists():
                    continue
                part[ref] = packed.read(member)
                if sha256(part[ref]).hexdigest() != ref.sha256:
                    raise DataError(f"{member.filename} has other bytes than its name says")
                size += member.file_size
                if size > PART_BYTES:
                    images.keep(part)
                    part, size = {}, 0
        images.keep(part)
    except (DataError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:  # as of one with a password
        raise DataError(
            f"the remote copy is damaged: {error}",
            code="remote_copy_damaged",
            where=where,
            remedy="where the images are, run the stage again with --force",
        ) from error
