"""What a remote store holds and nothing needs: found, and deleted once it is old.

A pack of images may be in use again soon: a push that finds it there names it in its artifact afterwards. So packs are
listed in `garbage/unused.json` first, where pushes look before they use one again, and deleted by a later collection.
What has a name that no store of ours gives is not looked at: others may keep files in the same bucket.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from armature.components.artifacts.leases import LEASES
from armature.components.artifacts.manifest import MANIFEST
from armature.components.artifacts.packs import UNUSED, unused_packs
from armature.components.artifacts.remote import DIGESTS, IMAGES_FILE, NO_STAGES
from armature.components.artifacts.remote_checkpoints import WORKSPACES, RemoteCheckpoints
from armature.components.artifacts.remote_folder import FileDetails, RemoteFolder, Upload
from armature.components.contracts.errors import DataError

_FINGERPRINT = r"[0-9a-f]{20}(-[\w.-]+)?"
_OURS = re.compile(
    rf"(?!({'|'.join(sorted(NO_STAGES))})/)[\w-]+/{_FINGERPRINT}/.+"
    rf"|({WORKSPACES}|{LEASES})/[\w-]+-{_FINGERPRINT}/.+"
    rf"|{DIGESTS}/(?P<two>[0-9a-f]{{2}})/(?P=two)[0-9a-f]+(\.dir)?"
    r"|images/(?P<first>[0-9a-f]{2})/(?P=first)[0-9a-f]{62}\.zip"
)
"""The names that `RemoteStore` gives: an artifact's, a checkpoint's or lease's, a digest's and a pack's."""

_DAMAGED = "nothing was deleted; delete this file in the remote store, and push its artifact again"


@dataclass(frozen=True)
class Garbage:
    """`name` is a file or a folder in the remote store, with these files."""

    why: str
    name: str
    files: Sequence[FileDetails]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Found:
    """`garbage` and `uploads` can be deleted; `unused` are packs that a later collection deletes, and since when."""

    garbage: Sequence[Garbage]
    uploads: Sequence[Upload]
    unused: dict[str, datetime]


def find_garbage(remote: RemoteFolder, older_than: timedelta) -> Found:
    """
    Args:
        older_than: what changed later than this ago is kept: a run in progress may need it.

    Raises:
        DataError: what says which files belong together cannot be read.
        StoreError: see `RemoteFolder`.
    """
    now = datetime.now(UTC)
    limit = now - older_than
    listing = _Listing(remote)
    garbage = [*listing.arrived_in_part(), *listing.checkpoints(), *listing.digests(), *listing.leases()]
    known, unused = unused_packs(remote), {}
    for pack, file in listing.unreferenced_packs():
        since = known.get(pack, now)
        if file.modified >= min(limit, since):
            continue  # new, or sent again since
        if since < limit:
            garbage.append(Garbage("images that no artifact shows", file.name, [file]))
        else:
            unused[pack] = since
    return Found(
        [each for each in garbage if all(file.modified < limit for file in each.files)],
        [upload for upload in remote.uploads() if _OURS.fullmatch(upload.name) and upload.begun < limit],
        unused,
    )


def delete_garbage(remote: RemoteFolder, found: Found) -> None:
    """Delete what is as it was found.

    Raises:
        StoreError: see `RemoteFolder`.
    """
    remote.write(UNUSED, json.dumps({pack: since.isoformat() for pack, since in found.unused.items()}).encode())
    for garbage in found.garbage:
        if sorted(remote.details(garbage.name)) == sorted(garbage.files):
            remote.remove(garbage.name)
    for upload in found.uploads:
        remote.abort(upload)


class _Listing:
    """All of ours that is in the remote store."""

    def __init__(self, remote: RemoteFolder) -> None:
        self._remote = remote
        self._files = {file.name: file for file in remote.details("") if _OURS.fullmatch(file.name)}
        self._folders: dict[tuple[str, str], list[FileDetails]] = defaultdict(list)
        for name, file in self._files.items():
            if name.count("/") > 1:
                first, second, _ = name.split("/", 2)
                self._folders[first, second].append(file)
        self._homes = [home for home in self._folders if home[0] not in NO_STAGES]
        self._made = {"-".join(home) for home in self._homes if f"{'/'.join(home)}/{MANIFEST}" in self._files}

    def arrived_in_part(self) -> Iterator[Garbage]:
        for home in self._homes:
            if "-".join(home) not in self._made:
                yield Garbage("artifact that arrived in part", "/".join(home), self._folders[home])

    def checkpoints(self) -> Iterator[Garbage]:
        for (folder, workspace), files in self._folders.items():
            if folder != WORKSPACES:
                continue
            if workspace in self._made:
                yield Garbage("checkpoint of a finished training", f"{folder}/{workspace}", files)
                continue
            newest = RemoteCheckpoints(self._remote).newest(workspace)
            others = defaultdict(list)
            for file in files:
                parts = file.name.split("/")
                if len(parts) > 3 and (newest is None or parts[2] != newest.folder):
                    others["/".join(parts[:3])].append(file)
            for name, its in others.items():
                yield Garbage("checkpoint that another has replaced, or that arrived in part", name, its)

    def digests(self) -> Iterator[Garbage]:
        for name, named in self._read(name for name in self._files if name.startswith(f"{DIGESTS}/")):
            if f"{named.get('stage')}-{named.get('fingerprint')}" not in self._made:
                yield Garbage("digest of an artifact that is gone", name, [self._files[name]])

    def leases(self) -> Iterator[Garbage]:
        for (folder, name), files in self._folders.items():
            if folder == LEASES:
                yield Garbage("lease that nobody holds", f"{folder}/{name}", files)

    def unreferenced_packs(self) -> Iterator[tuple[str, FileDetails]]:
        lists = (f"{'/'.join(home)}/{IMAGES_FILE}" for home in self._homes)
        shown = {pack for _, packs in self._read(lists) for pack in packs}
        for name, file in self._files.items():
            pack = name.rpartition("/")[2].removesuffix(".zip")
            if name.startswith("images/") and pack not in shown:
                yield pack, file

    def _read(self, names: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, content in self._remote.read_all([name for name in names if name in self._files]).items():
            try:
                document = json.loads(content)
            except ValueError as error:
                raise DataError(
                    f"cannot be read: {error}", code="remote_record_unreadable", where=name, remedy=_DAMAGED
                ) from error
            if not isinstance(document, dict):
                raise DataError(
                    "cannot be read: it is no JSON object", code="remote_record_unreadable", where=name, remedy=_DAMAGED
                )
            yield name, document
