"""Datasets on a hub or behind an fsspec URL. A file is downloaded when it is first needed, and cached."""

from __future__ import annotations

import platform
from pathlib import Path

from armature.components.artifacts.cache import DownloadCache, make_once
from armature.components.artifacts.fetched import (
    FetchedFiles,
    FileListing,
    fetched_home,
    list_files,
)
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import is_folder
from armature.components.machine.hub import HUB, hub_commit
from armature.components.robots.datasets.lerobot.layout import INFO, STATS, DatasetFiles, LocalFiles, belongs

RECORDED = "dataset"
"""Folder of the dataset within the artifact of a stage that records one."""


class FetchedDataset(FetchedFiles):
    """Files of a remote LeRobot dataset. The content digest leaves out meta/stats.json, which is downloaded too."""

    def names(self, part: str = "") -> list[str]:
        return [name for name in super().names(part) if belongs(name)]


def open_files(path: str, revision: str | None, cache: DownloadCache) -> DatasetFiles:
    """Return the files of a dataset in a folder, on the hub, or behind an fsspec URL.

    Args:
        path: a folder, possibly the artifact of a stage that recorded the dataset; a hub name (owner/name); or a URL
            such as s3://bucket/dataset.
        revision: commit, tag or branch of a hub dataset.
        cache: where downloaded files are kept.

    Raises:
        ConfigurationError: a hub name has no revision, or something else has one.
        DataError: there is no dataset, or it cannot be reached.
    """
    on_hub = refuse_missing_dataset(path, revision)
    if "://" in path:
        return FetchedDataset.opened(path.rstrip("/"), _list(path.rstrip("/")), cache)
    if not on_hub:
        folder, recorded = Path(path).absolute(), Path(path).absolute() / RECORDED
        return LocalFiles(folder if (folder / INFO).is_file() or not (recorded / INFO).is_file() else recorded)
    commit = hub_commit(path, str(revision), "dataset").commit
    url = f"hf://datasets/{path}@{commit}"
    listing = fetched_home(url, cache) / "listing.json"  # a commit never changes, so it is listed once
    make_once(listing, lambda path: _write_listing(_list(url), path))
    return FetchedDataset.opened(url, FileListing.model_validate_json(listing.read_bytes()), cache)


def refuse_missing_dataset(path: str, revision: str | None) -> bool:
    """Return True for a hub name with a revision, and False for a folder that exists or a URL. Nothing is fetched.

    Raises:
        ConfigurationError: a hub name has no revision, or something else has one.
        DataError: there is no such folder.
    """
    if "://" not in path and HUB.fullmatch(path) and not path.startswith(".") and not is_folder(path):
        if revision is None:
            raise ConfigurationError(
                "a hub name needs a revision",
                code="revision_missing",
                where=f"dataset {path!r}, which is not a folder",
                remedy="name a dataset's folder, or set revision to the commit that its page shows under its history",
            )
        return True
    if revision is not None:
        raise ConfigurationError(
            f"revision {revision!r} is set, but only a hub name has a revision", code="revision_unused", where=path
        )
    if "://" not in path and not is_folder(path):
        raise DataError("the folder does not exist", code="not_a_lerobot_dataset", where=path)
    return False


def same_files(where: str, quick_digest: str, cache: DownloadCache) -> DatasetFiles:
    """Return the files that another process has opened. where: the `str` of that process's files.

    Raises:
        DataError: the files cannot be reached from here, or differ.
    """
    files = FetchedDataset.opened(where, _list(where), cache) if "://" in where else LocalFiles(Path(where))
    if (actual := files.quick_digest()) != quick_digest:
        raise DataError(
            f"the dataset's names, sizes or times differ here: the digest is {actual}, not {quick_digest}",
            code="node_files_differ",
            where=f"{where} on {platform.node()}",
            remedy="all nodes need the same files under the same path or URL",
        )
    return files


def _list(url: str) -> FileListing:
    listing = list_files(url, lambda name: belongs(name) or name == STATS)
    if INFO not in listing.files:
        raise DataError(
            "there is no LeRobot dataset: meta/info.json is missing", code="not_a_lerobot_dataset", where=url
        )
    return listing


def _write_listing(listing: FileListing, path: Path) -> None:
    path.write_text(listing.model_dump_json())
