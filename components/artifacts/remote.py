"""A remote copy of the artifact store behind an fsspec URL, such as s3://bucket/prefix.

<url>/<stage>/<fingerprint>/artifact.json   marker of an artifact, created once by the machine that is first
<url>/<stage>/<fingerprint>/<copy>/<md5>    files of one machine's copy by content, and `images.zip`
<url>/digests/<two digits>/<digest>         stage and fingerprint of the artifact with this digest
<url>/attempts/<stage>-<fingerprint>/       checkpoints, see `armature.components.artifacts.remote_attempts`
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
from armature.components.artifacts.remote_folder import Files, RemoteFolder, Source
from armature.components.contracts.errors import ConfigurationError, DataError

MARKER = "artifact.json"
DIGESTS = "digests"
NO_STAGES = frozenset({ATTEMPTS, DIGESTS, "images", "remote", "replaced", "workspaces"})
"""Names of folders in a local or remote store that do not contain artifacts of a stage."""
ARCHIVE = "images.zip"
_SHORTENED = re.compile(r"[0-9a-f]{6,32}(\.dir)?")
_PLAIN = r"^\w[\w.-]*$"


class RemoteMarker(BaseModel):
    """Marker of a remote artifact.

    Attributes:
        copy_id: name of the folder with the files.
        digest: digest of the artifact.
        files: MD5 and size in bytes of each file, by relative path.
        images: size in bytes of the archive of images; None if the artifact shows no images.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    marker_version: Literal[1] = 1
    copy_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    digest: str
    files: Files
    images: NonNegativeInt | None = None


class NamedArtifact(BaseModel):
    """Stage and fingerprint of the artifact that has a certain digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Annotated[str, Field(pattern=_PLAIN)]
    fingerprint: Annotated[str, Field(pattern=_PLAIN)]


class RemoteStore:
    """Artifacts in a remote store. An artifact exists there if its marker does.

    Object stores cannot rename folders, so the marker is created after all files. Artifacts share no files, so deleting
    one does not affect others.

    Args:
        url: address of the remote store.
        root: folder of the local store.
        say: see `RemoteFolder`.

    Raises:
        ConfigurationError: `url` is not an address, lies in `root`, or needs a package that is not installed.
        DataError: raised by every method that reads, if a document in the remote store is damaged.
        StoreError: raised by every method, see `RemoteFolder`.
    """

    def __init__(self, url: str, root: Path, say: Callable[[str], None]) -> None:
        self.url, self._say = url, say
        self.state = root / "remote" / sha256(url.encode()).hexdigest()[:12]
        """Local folder with notes about this remote store."""
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
        """Return a context with a temporary folder on the disk of the local store, for files being sent or fetched."""
        self.state.mkdir(parents=True, exist_ok=True)
        return locked_sibling(self.state / "scratch")

    def marker(self, stage: str, fingerprint: str) -> RemoteMarker | None:
        """Return the marker of an artifact, None if the remote does not have the artifact."""
        return self._files.read(f"{stage}/{fingerprint}/{MARKER}", RemoteMarker)

    def push(self, stage: str, fingerprint: str, folder: Path, record: Record, copy_id: str) -> RemoteMarker:
        """Copy a finished artifact and its images to the remote, unless it has one. Files that an earlier push of
        `copy_id` sent are skipped.

        Returns:
            The marker that counts: the marker of this copy, or of the machine that was first.
        """
        home, marker = f"{stage}/{fingerprint}", self.marker(stage, fingerprint)
        while marker is None:
            mine = self._send_copy(home, folder, record, copy_id)
            named = NamedArtifact(stage=stage, fingerprint=fingerprint)
            self._files.write(f"{DIGESTS}/{record.digest[:2]}/{record.digest}", named)
            created = self._files.create(f"{home}/{MARKER}", mine)
            # The marker of another machine may be gone again, by --force there.
            marker = mine if created else self.marker(stage, fingerprint)
        if marker.copy_id != copy_id:
            self._files.remove(f"{home}/{copy_id}")
        return marker

    def _send_copy(self, home: str, folder: Path, record: Record, copy_id: str) -> RemoteMarker:
        """Send those files of one copy of an artifact that the remote lacks. Return the marker to be created
        afterwards, which makes this copy the artifact."""
        files = {name: (md5, state.size) for name, (md5, state) in record.files.items()}
        contents = {md5: folder / name for name, (md5, _) in files.items()}
        images, refs = None, image_refs(folder)
        with self.scratch() as scratch:
            if refs:
                contents[ARCHIVE] = scratch / ARCHIVE
                write_archive(self._images, refs, contents[ARCHIVE], self._say)
                images = contents[ARCHIVE].stat().st_size
            self._files.put(f"{home}/{copy_id}", contents)
        return RemoteMarker(copy_id=copy_id, digest=record.digest, files=files, images=images)

    def fetch(self, stage: str, fingerprint: str, marker: RemoteMarker, folder: Path) -> None:
        """Copy the files of an artifact into `folder`.

        Raises:
            DataError: a file name leads out of the folder; or a file is gone, as when the artifact is deleted
                meanwhile.
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
        """Fetch the images that the tables in `folder` show into the local image store, unless all are there.

        Raises:
            DataError: the archive of images is damaged.
        """
        if marker.images is None or all(self._images.path(ref).exists() for ref in image_refs(folder)):
            return
        name = f"{stage}/{fingerprint}/{marker.copy_id}/{ARCHIVE}"
        with self.scratch() as scratch:
            archive = scratch / ARCHIVE
            self._files.get({archive: Source(name, marker.images)})
            unpack_archive(archive, self._images, f"{self.url}/{name}")

    def find_digest(self, digest: str) -> tuple[str, str] | None:
        """Return stage and fingerprint of the artifact whose digest begins with `digest`, or None."""
        if _SHORTENED.fullmatch(digest) is None:
            return None
        folder = f"{DIGESTS}/{digest[:2]}"
        for name in self._files.listed(folder):
            if name.startswith(digest) and (named := self._files.read(f"{folder}/{name}", NamedArtifact)):
                return named.stage, named.fingerprint
        return None

    def remove(self, stage: str, fingerprint: str) -> None:
        """Delete the artifact of this fingerprint, the artifacts of its parts (`<fingerprint>-<number>`), and its
        checkpoints."""
        self.attempts.remove(f"{stage}-{fingerprint}")
        for folder in self._files.listed(""):
            for name in self._files.listed(folder) if folder not in NO_STAGES else ():
                if name == fingerprint or name.startswith(f"{fingerprint}-"):
                    self.discard(folder, name)

    def discard(self, stage: str, fingerprint: str) -> None:
        """Delete one artifact, its marker first. A copy that another machine is sending right now is not touched."""
        home = f"{stage}/{fingerprint}"
        try:
            marker = self.marker(stage, fingerprint)
        except DataError:  # a damaged marker does not say which folder has the files, so they stay
            marker = None
        self._files.remove(f"{home}/{MARKER}")
        if marker is not None:
            self._files.remove(f"{home}/{marker.copy_id}")
