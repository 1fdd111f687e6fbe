"""A remote copy of the artifact store behind an fsspec URL, such as s3://bucket/prefix.

<url>/<stage>/<fingerprint>/artifact.json   the marker of an artifact: created once, by the machine that is first
<url>/<stage>/<fingerprint>/<copy>/<md5>    its files by content, and `images.zip`: of one machine, in no other's way
<url>/digests/<two digits>/<digest>         which artifact has this digest
<url>/attempts/<stage>-<fingerprint>/       checkpoints: see `armature.components.artifacts.remote_attempts`
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from armature.components.artifacts.disk import locked_sibling
from armature.components.artifacts.images import ImageStore, image_refs, unpack_archive, write_archive
from armature.components.artifacts.record import Record
from armature.components.artifacts.remote_attempts import ATTEMPTS, RemoteAttempts
from armature.components.artifacts.remote_folder import RemoteFolder, Source
from armature.components.contracts.errors import ConfigurationError, DataError

MARKER = "artifact.json"
DIGESTS = "digests"
NO_STAGES = frozenset({ATTEMPTS, DIGESTS, "images", "remote", "replaced", "workspaces"})
"""Folders of a store, here or remote, that are not those of a stage."""
ARCHIVE = "images.zip"
_SHORTENED = re.compile(r"[0-9a-f]{6,32}(\.dir)?")
_PLAIN = r"^\w[\w.-]*$"


class RemoteMarker(BaseModel):
    """`copy_id` is the folder that has the files; `files` maps relpath to md5 and size; `images` is the archive's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    marker_version: Literal[1] = 1
    copy_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    digest: str
    files: dict[str, tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")], NonNegativeInt]]
    images: NonNegativeInt | None = None


class NamedArtifact(BaseModel):
    """The artifact that has a digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Annotated[str, Field(pattern=_PLAIN)]
    fingerprint: Annotated[str, Field(pattern=_PLAIN)]


class RemoteStore:
    """Object stores cannot rename folders, so an artifact's marker is created last: without it there is no artifact.

    Nothing of one artifact belongs to another one, so deleting an artifact takes nothing from others.

    Args:
        root: of the store here.
        say: see `RemoteFolder`.

    Raises:
        ConfigurationError: `url` is not one, lies in `root`, or needs a package that is not installed.
        DataError: of every method that reads: a document in the remote store is damaged.
        StoreError: of every method: see `RemoteFolder`.
    """

    def __init__(self, url: str, root: Path, say: Callable[[str], None]) -> None:
        self.url, self._say = url, say
        self.state = root / "remote" / sha256(url.encode()).hexdigest()[:12]
        """What is known of this remote store here."""
        self._files, self._images = RemoteFolder(url, say), ImageStore(root / "images")
        if self._files.folder is not None and self._files.folder.is_relative_to(root.resolve()):
            raise ConfigurationError(
                "the remote store lies in the store of this machine",
                code="remote_store_inside_store",
                where=f"machine.remote_store = {url!r}, machine.store = {str(root)!r}",
                remedy="give it a folder of its own",
            )
        self.attempts = RemoteAttempts(self._files, self.scratch, say)

    def scratch(self) -> AbstractContextManager[Path]:
        """A folder on the disk of the store, for what is being sent or fetched; see `disk.collect`."""
        self.state.mkdir(parents=True, exist_ok=True)
        return locked_sibling(self.state / "scratch")

    def marker(self, stage: str, fingerprint: str) -> RemoteMarker | None:
        return self._files.read(f"{stage}/{fingerprint}/{MARKER}", RemoteMarker)

    def push(self, stage: str, fingerprint: str, folder: Path, record: Record, copy_id: str) -> RemoteMarker:
        """Copy a finished artifact and its images, unless one is there. What an earlier push of `copy_id` has sent is
        not sent again.

        Returns:
            The marker that counts: of this copy, or of another machine that was first.
        """
        home, marker = f"{stage}/{fingerprint}", self.marker(stage, fingerprint)
        while marker is None:
            mine = self._sent(home, folder, record, copy_id)
            named = NamedArtifact(stage=stage, fingerprint=fingerprint)
            self._files.write(f"{DIGESTS}/{record.digest[:2]}/{record.digest}", named)
            created = self._files.create(f"{home}/{MARKER}", mine)
            marker = mine if created else self.marker(stage, fingerprint)  # None: --force on another machine
        if marker.copy_id != copy_id:
            self._files.remove(f"{home}/{copy_id}")
        return marker

    def _sent(self, home: str, folder: Path, record: Record, copy_id: str) -> RemoteMarker:
        there = self._files.facts(f"{home}/{copy_id}")
        files = {name: (md5, state.size) for name, (md5, state) in record.files.items()}
        lacking = {md5: folder / name for name, (md5, size) in files.items() if there.get(md5, {}).get("size") != size}
        images, refs = None, image_refs(folder)
        with self.scratch() as scratch:
            if refs:
                archive = scratch / ARCHIVE
                write_archive(self._images, refs, archive, self._say)
                images = archive.stat().st_size
                if there.get(ARCHIVE, {}).get("size") != images:
                    lacking[ARCHIVE] = archive
            self._files.put({f"{home}/{copy_id}/{name}": path for name, path in lacking.items()})
        return RemoteMarker(copy_id=copy_id, digest=record.digest, files=files, images=images)

    def fetch(self, stage: str, fingerprint: str, marker: RemoteMarker, folder: Path) -> None:
        """Copy the files of an artifact into `folder`.

        Raises:
            DataError: a name leaves the folder; or a file is gone, as when the artifact is deleted meanwhile.
        """
        home, files = f"{stage}/{fingerprint}", {}
        for name, (md5, size) in marker.files.items():
            target = folder / name
            if not name or not target.resolve().is_relative_to(folder.resolve()):
                raise DataError(
                    f"the file name {name!r:.200} leaves the folder of its artifact",
                    code="unsafe_file_name",
                    where=f"{self.url}/{home}/{MARKER}",
                )
            files[target] = Source(f"{home}/{marker.copy_id}/{md5}", size)
        self._files.get(files)

    def fetch_images(self, stage: str, fingerprint: str, marker: RemoteMarker, folder: Path) -> None:
        """Have the images that the tables in `folder` show.

        Raises:
            DataError: their archive is damaged.
        """
        if marker.images is None or all(self._images.path(ref).exists() for ref in image_refs(folder)):
            return
        name = f"{stage}/{fingerprint}/{marker.copy_id}/{ARCHIVE}"
        with self.scratch() as scratch:
            archive = scratch / ARCHIVE
            self._files.get({archive: Source(name, marker.images)})
            unpack_archive(archive, self._images, f"{self.url}/{name}")

    def find_digest(self, digest: str) -> tuple[str, str] | None:
        """Stage and fingerprint of the artifact whose digest begins so."""
        if _SHORTENED.fullmatch(digest) is None:
            return None
        folder = f"{DIGESTS}/{digest[:2]}"
        for name in self._files.listed(folder):
            if name.startswith(digest) and (named := self._files.read(f"{folder}/{name}", NamedArtifact)):
                return named.stage, named.fingerprint
        return None

    def remove(self, stage: str, fingerprint: str) -> None:
        """Delete the artifacts of this fingerprint and of its units, and its checkpoints."""
        self.attempts.remove(f"{stage}-{fingerprint}")
        for folder in self._files.listed(""):
            for name in self._files.listed(folder) if folder not in NO_STAGES else ():
                if name == fingerprint or name.startswith(f"{fingerprint}-"):
                    self.discard(folder, name)

    def discard(self, stage: str, fingerprint: str) -> None:
        """Delete one artifact, its marker first. What another machine is sending of it stays."""
        home = f"{stage}/{fingerprint}"
        try:
            marker = self.marker(stage, fingerprint)
        except DataError:  # damaged: nobody finds its files any more
            marker = None
        self._files.remove(f"{home}/{MARKER}")
        if marker is not None:
            self._files.remove(f"{home}/{marker.copy_id}")
