"""Datasets that the library `datasets` reads: from the hub at a commit, or saved on disk."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from armature.components.artifacts.cache import DownloadCache
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.environments.dataset.shards import ArrowRows, Shard
from armature.components.hub import hub_commit
from armature.components.installation import install_command

SAVED = ("state.json", "dataset_dict.json")
"""One of them is in a folder that `save_to_disk` wrote."""


def dataset_commit(name: str, revision: str | None) -> str:
    """
    Raises:
        ConfigurationError: no revision is given.
        DataError: there is no such dataset or revision, or the hub cannot be reached.
    """
    if revision is None:
        raise ConfigurationError(
            "a hub name needs a revision",
            code="revision_missing",
            where=f"environment.args.source = {name!r}, which is not a file or a folder here",
            remedy="set environment.args.revision to the commit that the dataset's page shows under its history",
        )
    return hub_commit(name, revision, "dataset").commit


def hub_shards(name: str, commit: str, subset: str) -> list[Shard]:
    """
    Raises:
        ConfigurationError: the library is not installed, or there is no such subset.
        DataError: the dataset cannot be fetched or read.
    """
    library = _library()
    _refuse_large(name, commit)
    try:
        found = library.load_dataset(name, subset or None, revision=commit)
    except Exception as error:  # the network's, the hub's, and those of whatever reads the files
        raise DataError(
            f"the dataset cannot be loaded: {type(error).__name__}: {str(error)[:500]}",
            code="dataset_unreadable",
            where=f"{name} at {commit}",
            remedy="check its name and environment.args.subset; log in for a gated dataset",
        ) from error
    return _shards(found)


def _refuse_large(name: str, commit: str) -> None:
    """Refuse a dataset that has more bytes than one may fetch. The library itself has no limit.

    Raises:
        DataError: it has more.
    """
    from huggingface_hub import HfApi

    size, limit = 0, DownloadCache.standard().limit_bytes
    with suppress(Exception):  # without the hub its cache is read, and other faults are found by the library
        files = HfApi().list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
        size = sum(getattr(file, "size", 0) for file in files)
    if size > limit:
        raise DataError(
            f"the dataset has {size / 1e9:.3g} GB, more than the {limit / 1e9:.3g} GB that one may take",
            code="fetch_limit_exceeded",
            where=f"{name} at {commit}",
            remedy="raise ARMATURE_FETCH_LIMIT_GB, or take a smaller one",
        )


def saved_shards(folder: Path) -> list[Shard]:
    """
    Raises:
        ConfigurationError: the library is not installed.
        DataError: the dataset cannot be read.
    """
    library = _library()
    try:
        found = library.load_from_disk(str(folder))
    except Exception as error:  # those of whatever reads the files
        raise DataError(
            f"the saved dataset cannot be read: {type(error).__name__}: {str(error)[:500]}",
            code="dataset_unreadable",
            where=str(folder),
        ) from error
    return _shards(found)


def _library() -> Any:
    if find_spec("datasets") is None:
        raise ConfigurationError(
            "a Hugging Face dataset needs the package datasets",
            code="package_missing",
            remedy=install_command("huggingface"),
        )
    import datasets

    return datasets


def _shards(found: Any) -> list[Shard]:
    splits: Mapping[str, Any] = found if isinstance(found, Mapping) else {str(found.split or "train"): found}
    return [_split(name, splits[name]) for name in sorted(splits)]


def _split(name: str, rows: Any) -> ArrowRows:
    """Class labels are given by their names."""
    stored = rows.with_format("arrow")
    labels = {key: feature for key, feature in rows.features.items() if hasattr(feature, "int2str")}

    def read(start: int, stop: int) -> pa.Table:
        table = stored[start:stop]
        for key, feature in labels.items():
            named = [None if value is None or value < 0 else feature.int2str(value) for value in table[key].to_pylist()]
            table = table.set_column(table.column_names.index(key), key, pa.array(named, pa.string()))
        return table

    return ArrowRows(name, len(rows), rows.column_names, read)
