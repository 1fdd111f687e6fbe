"""A remote copy of the artifact store behind an fsspec URL, such as s3://bucket/prefix.

<url>/<stage>/<fingerprint>/            an artifact; `.images.json` in it says which packs have the images of its tables
<url>/images/                           packs of images: see `armature.components.artifacts.packs`
<url>/digests/<two digits>/<digest>     which artifact has this digest
<url>/workspaces/<stage>-<fingerprint>/ the newest checkpoint: see `armature.components.artifacts.remote_checkpoints`
<url>/leases/<stage>-<fingerprint>/     which machine makes it: see `armature.components.artifacts.leases`
<url>/garbage/                          what is going to be deleted: see `armature.components.artifacts.garbage`
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from armature.components.artifacts.leases import LEASES, RemoteLeases
from armature.components.artifacts.manifest import MANIFEST
from armature.components.artifacts.outbox import SCRATCH
from armature.components.artifacts.packs import ImagePacks
from armature.components.artifacts.remote_checkpoints import WORKSPACES, RemoteCheckpoints
from armature.components.artifacts.remote_folder import RemoteFolder
from armature.components.contracts.errors import ConfigurationError, DataError

IMAGES_FILE = ".images.json"
DIGESTS = "digests"
NO_STAGES = frozenset({DIGESTS, "garbage", "images", LEASES, WORKSPACES})
_SHORTENED = re.compile(r"[0-9a-f]{6,32}(\.dir)?")
_PLAIN = re.compile(r"\w[\w.-]*")


def refuse_store_as_remote(remote: RemoteFolder, root: Path) -> None:
    """
    Raises:
        ConfigurationError: `remote` is in the folder `root` of the store here: files of both would be mixed.
    """
    if remote.folder is not None and remote.folder.is_relative_to(root.resolve()):
        raise ConfigurationError(
            "the remote store lies in the store of this machine",
            code="remote_store_inside_store",
            where=f"machine.remote_store = {remote.url!r}, machine.store = {str(root)!r}",
            remedy="give it a folder of its own",
        )


class RemoteStore:
    """Object stores cannot rename folders, so the manifest is sent last: without it there is no artifact.

    Args:
        root: of the store here.
        say: see `RemoteFolder`.

    Raises:
        ConfigurationError: `url` is not one, lies in `root`, or needs a package that is not installed.
        StoreError: of every method: see `RemoteFolder`.
    """

    def __init__(self, url: str, root: Path, say: Callable[[str], None]) -> None:
        self.url = url
        state = root / "remote" / sha256(url.encode()).hexdigest()[:12]
        self.outbox = state / "outbox"
        self.scratch = self.outbox / SCRATCH
        self._files = RemoteFolder(url, say)
        refuse_store_as_remote(self._files, root)
        self._packs = ImagePacks(self._files, root / "images", state, self.scratch, say)
        self.checkpoints = RemoteCheckpoints(self._files)
        self.leases = RemoteLeases(self._files, state / "store-id", say)

    def has(self, stage: str, fingerprint: str) -> bool:
        return self._files.has(f"{stage}/{fingerprint}/{MANIFEST}")

    def push(self, stage: str, fingerprint: str, folder: Path, digest: str) -> None:
        """Copy a finished artifact and its images, unless it is there. What arrives of it before the manifest is not
        seen as an artifact."""
        if self.has(stage, fingerprint):
            return
        home = f"{stage}/{fingerprint}"
        if packs := self._packs.push(folder):
            self._files.write(f"{home}/{IMAGES_FILE}", json.dumps(packs, sort_keys=True).encode())
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        self._files.put({f"{home}/{name}": folder / name for name in names if name != MANIFEST})
        named = json.dumps({"stage": stage, "fingerprint": fingerprint})
        self._files.write(f"{DIGESTS}/{digest[:2]}/{digest}", named.encode())
        self._files.put({f"{home}/{MANIFEST}": folder / MANIFEST})

    def fetch(self, stage: str, fingerprint: str, folder: Path) -> None:
        """
        Raises:
            DataError: a name leaves the folder, or the images of the artifact are damaged.
        """
        home, files = f"{stage}/{fingerprint}", {}
        for name in self._files.found(home):
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise DataError(
                    "a file name in the remote store leaves its folder",
                    code="unsafe_file_name",
                    where=f"{self.url}/{home}/{name}",
                )
            files[f"{home}/{name}"] = target
        if files.pop(f"{home}/{IMAGES_FILE}", None) is not None:
            self._packs.fetch(json.loads(self._files.read(f"{home}/{IMAGES_FILE}")))
        self._files.get(files)

    def find_digest(self, digest: str) -> tuple[str, str] | None:
        """Stage and fingerprint of the artifact whose digest begins so."""
        if _SHORTENED.fullmatch(digest) is None:
            return None
        folder = f"{DIGESTS}/{digest[:2]}"
        for name in self._files.listed(folder):
            if name.startswith(digest):
                named = json.loads(self._files.read(f"{folder}/{name}"))
                stage, fingerprint = str(named["stage"]), str(named["fingerprint"])
                if all(map(_PLAIN.fullmatch, (stage, fingerprint))) and stage not in NO_STAGES:
                    return stage, fingerprint
        return None

    def remove(self, stage: str, fingerprint: str) -> None:
        """Delete the artifacts of this fingerprint and of its units, the manifests first, and its checkpoint."""
        self.checkpoints.remove(f"{stage}-{fingerprint}")
        for folder in self._files.listed(""):
            if folder in NO_STAGES:
                continue
            for name in self._files.listed(folder):
                if name == fingerprint or name.startswith(f"{fingerprint}-"):
                    self.discard(folder, name)

    def discard(self, stage: str, fingerprint: str) -> None:
        """Delete one artifact, its manifest first; its images stay in their packs."""
        self._files.remove(f"{stage}/{fingerprint}/{MANIFEST}")
        self._files.remove(f"{stage}/{fingerprint}")
