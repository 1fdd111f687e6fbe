"""Images in a remote store: packs of many, which the artifacts that show them refer to.

`images/<first two digits>/<digest>.zip` has images uncompressed under the names that they have in the image store. A
pack is named by the names in it, so that who makes it again makes the same.
"""

from __future__ import annotations

import json
import re
import sqlite3
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from armature.components.artifacts.images import FORMATS, MAX_BYTES, ImageStore
from armature.components.artifacts.remote_folder import RemoteFolder
from armature.components.artifacts.tables import IMAGE_REF
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef

UNUSED = "garbage/unused.json"
"""Packs that are going to be deleted, and since when: see `armature.components.artifacts.garbage`."""
PACK_BYTES = 64 * 2**20
_NAME = re.compile(r"([0-9a-f]{64})\.(png|jpeg|webp)")
_PACK = re.compile(r"[0-9a-f]{64}")
_DATE = (1980, 1, 1, 0, 0, 0)
_MEDIA_TYPES = {name.lower(): media_type for media_type, name in FORMATS.items()}


def image_refs(folder: Path) -> Iterator[ImageRef]:
    """The images that the tables in `folder` refer to, each once, without their sizes."""
    seen: set[tuple[str, str]] = set()
    for path in sorted(folder.rglob("*.parquet")):
        columns = [field.name for field in pq.read_schema(path) if _shows_images(field.type)]
        for column in pq.read_table(path, columns=columns).columns if columns else ():
            rows = pc.list_flatten(column)
            digests, kinds = (pc.struct_field(rows, name).to_pylist() for name in ("sha256", "media_type"))
            seen.update(zip(digests, kinds, strict=True))
    for digest, kind in sorted(seen):
        yield ImageRef(digest, kind, 0, 0)


def _shows_images(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and kind.value_type == IMAGE_REF


class ImagePacks:
    """The packs of one remote store.

    Args:
        remote: where they are.
        root: the image store here.
        state: a folder that remembers what is in which pack.
        scratch: a folder for a pack that is being sent.
    """

    def __init__(
        self, remote: RemoteFolder, root: Path, state: Path, scratch: Path, say: Callable[[str], None]
    ) -> None:
        self._remote, self._images, self._say = remote, ImageStore(root), say
        self._scratch, self._ledger = scratch, state / "packs.sqlite"
        self._there: set[str] = set()

    def push(self, folder: Path) -> dict[str, list[str]] | None:
        """Send the images of the artifact in `folder` that no pack has; the packs that have them, with their names.

        None where its tables show none.

        Raises:
            StoreError: see `RemoteFolder`.
        """
        refs = {self._images.path(ref).name: ref for ref in image_refs(folder)}
        if not refs:
            return None
        self._scratch.mkdir(parents=True, exist_ok=True)
        packs: dict[str, list[str]] = {}
        for name, pack in self._known(refs).items():
            packs.setdefault(pack, []).append(name)
        unused = unused_packs(self._remote) if packs else {}
        self._look_up(packs)
        packs = {pack: names for pack, names in packs.items() if pack in self._there and pack not in unused}
        sent = {name for names in packs.values() for name in names}
        with TemporaryDirectory(dir=self._scratch) as scratch:
            for pack, names in self._pack([ref for name, ref in refs.items() if name not in sent], Path(scratch)):
                self._remote.put({_remote_name(pack): Path(scratch) / pack})
                (Path(scratch) / pack).unlink()
                self._remember(pack, names)
                packs[pack] = names
        return packs

    def fetch(self, packs: Mapping[str, Collection[str]]) -> None:
        """Have the images of `packs` here, and with them what else is in a pack of which one is missing.

        Raises:
            DataError: a pack is damaged or lacks an image.
            StoreError: see `RemoteFolder`.
        """
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        for pack, names in packs.items():
            if _PACK.fullmatch(pack) is None or not all(_NAME.fullmatch(name) for name in names):
                raise DataError(
                    "not the name of a pack of images, or of an image", code="invalid_pack_name", where=pack
                )
            if all(self._images.path(_ref(name)).exists() for name in names):
                continue
            with TemporaryDirectory(prefix="pack-") as scratch:
                file = Path(scratch) / pack
                self._remote.get({_remote_name(pack): file})
                there = self._unpack(file, pack)
            if missing := sorted(set(names) - there):
                raise DataError(
                    f"a pack of images lacks {missing[0]}", code="pack_incomplete", where=_remote_name(pack)
                )
            self._remember(pack, there)

    def _unpack(self, file: Path, pack: str) -> set[str]:
        names: set[str] = set()
        part: dict[ImageRef, bytes] = {}
        size = 0
        try:
            with zipfile.ZipFile(file) as packed:
                for member in packed.infolist():
                    found = _NAME.fullmatch(member.filename)
                    if not found or member.compress_type != zipfile.ZIP_STORED or member.file_size > MAX_BYTES:
                        raise DataError(f"not an image: {member.filename!r}")
                    names.add(member.filename)
                    ref = _ref(member.filename)
                    if self._images.path(ref).exists():
                        continue
                    data = packed.read(member)
                    if sha256(data).hexdigest() != found[1]:
                        raise DataError(f"{member.filename} has other bytes than its name says")
                    part[ref] = data
                    size += len(data)
                    if size > PACK_BYTES:
                        self._images.keep(part)
                        part, size = {}, 0
            self._images.keep(part)
        except (DataError, zipfile.BadZipFile, EOFError) as error:
            raise DataError(
                f"the remote copy is damaged: {error}",
                code="remote_copy_damaged",
                where=_remote_name(pack),
                remedy="delete that file in the remote store; where the images are, run the stage again with --force",
            ) from error
        return names

    def _pack(self, refs: Iterable[ImageRef], scratch: Path) -> Iterator[tuple[str, list[str]]]:
        """Write packs of `refs` to `scratch` one by one, each under its name; gives it and what is in it."""
        part: dict[str, bytes] = {}
        size, missing = 0, []
        for ref in refs:
            try:
                data = self._images.read(ref)
            except DataError as error:
                missing.append(error.what)
                continue
            part[self._images.path(ref).name] = data
            size += len(data)
            if size > PACK_BYTES:
                yield _written(part, scratch), sorted(part)
                part, size = {}, 0
        if part:
            yield _written(part, scratch), sorted(part)
        if missing:
            self._say(f"the remote store gets {len(missing)} images less than its tables name: {missing[0]}")

    def _look_up(self, packs: Iterable[str]) -> None:
        names = {pack: _remote_name(pack) for pack in packs if pack not in self._there}
        found = self._remote.those_there(names.values())
        self._there |= {pack for pack, name in names.items() if name in found}

    def _known(self, names: Iterable[str]) -> dict[str, str]:
        with closing(self._opened()) as ledger:
            ask = "SELECT pack FROM packed WHERE image = ?"
            found = ((name, ledger.execute(ask, (name,)).fetchone()) for name in names)
            return {name: row[0] for name, row in found if row is not None}

    def _remember(self, pack: str, names: Iterable[str]) -> None:
        self._there.add(pack)
        with closing(self._opened()) as ledger, ledger:
            ledger.executemany("INSERT OR REPLACE INTO packed VALUES (?, ?)", ((name, pack) for name in names))

    def _opened(self) -> sqlite3.Connection:
        ledger = sqlite3.connect(self._ledger, timeout=60)
        ledger.execute("CREATE TABLE IF NOT EXISTS packed (image TEXT PRIMARY KEY, pack TEXT) WITHOUT ROWID")
        return ledger


def _ref(name: str) -> ImageRef:
    digest, _, kind = name.partition(".")
    return ImageRef(digest, _MEDIA_TYPES[kind], 0, 0)


def unused_packs(remote: RemoteFolder) -> dict[str, datetime]:
    """What `UNUSED` says."""
    said = json.loads(remote.read_if_there(UNUSED) or b"{}")
    return {pack: datetime.fromisoformat(since) for pack, since in said.items()}


def _written(images: Mapping[str, bytes], folder: Path) -> str:
    pack = sha256(json.dumps(sorted(images)).encode()).hexdigest()
    with zipfile.ZipFile(folder / pack, "w", zipfile.ZIP_STORED) as packed:
        for name in sorted(images):
            packed.writestr(zipfile.ZipInfo(name, _DATE), images[name])
    return pack


def _remote_name(pack: str) -> str:
    return f"images/{pack[:2]}/{pack}.zip"
