"""`armature store gc`: what a remote store holds and nothing needs."""

from __future__ import annotations

from datetime import timedelta

from tqdm import tqdm

from armature.components.artifacts.garbage import delete_garbage, find_garbage
from armature.components.artifacts.remote import refuse_store_as_remote
from armature.components.artifacts.remote_folder import RemoteFolder
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.home import home_folder


def collect(machine: Machine, days: int, dry_run: bool) -> None:
    """Delete it, unless `dry_run`, and print what and how much.

    Raises:
        ConfigurationError: there is no remote store, or it lies in the store here.
        DataError: what says which files belong together cannot be read.
        StoreError: the remote store cannot be used.
    """
    if machine.remote_store is None:
        raise ConfigurationError(
            "there is no remote store",
            code="remote_store_missing",
            where="machine.remote_store",
            remedy="name it: --machine remote_store=URL",
        )
    remote = RemoteFolder(machine.remote_store, tqdm.write)
    refuse_store_as_remote(remote, home_folder() / machine.store)
    found = find_garbage(remote, timedelta(days=days))
    for garbage in found.garbage:
        print(f"{garbage.name}: {garbage.why}, {len(garbage.files)} files, {_size(garbage.bytes)}")
    for upload in found.uploads:
        print(f"{upload.name}: upload that was begun on {upload.begun:%Y-%m-%d} and not completed")
    if not dry_run:
        delete_garbage(remote, found)
    files, size = sum(len(each.files) for each in found.garbage), sum(each.bytes for each in found.garbage)
    verb = "would be deleted" if dry_run else "deleted"
    print(f"{verb}: {files} files, {_size(size)}, and {len(found.uploads)} uploads that were not completed")
    if found.unused:
        print(
            f"{len(found.unused)} packs of images that no artifact shows are deleted by a collection {days} days after "
            "the one that found them first"
        )


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
