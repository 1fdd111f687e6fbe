"""Datasets that the library `datasets` reads: from the hub at a commit, or saved on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from armature.components.artifacts.cache import DownloadCache
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.installation import install_command
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.shards import ArrowRows, Shard
from armature.components.environments.dataset.values import column_values
from armature.components.machine.hub import hub_commit

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
    """Class labels are given by their names, also those in lists and structs."""
    stored = rows.with_format("arrow")
    named = {key: _names(feature) for key, feature in rows.features.items()}

    def values(key: str, column: pa.ChunkedArray) -> list[Any]:
        plain, name_of = column_values(column), named[key]
        return plain if name_of is None else list(map(name_of, plain))

    return ArrowRows(name, len(rows), rows.column_names, lambda start, stop: stored[start:stop], values)


def _names(feature: Any) -> Callable[[Any], Any] | None:
    """Put the names of class labels in place of their numbers in a value; None: it has none."""
    if hasattr(feature, "int2str"):
        return lambda value: None if value is None or value < 0 else _label(feature, value)
    if isinstance(feature, Mapping):
        fields = {key: each for key, inner in feature.items() if (each := _names(inner))}
        if not fields:
            return None
        return lambda value: value and value | {key: each(value[key]) for key, each in fields.items()}
    name_of = _names(feature.feature) if hasattr(feature, "feature") else None
    return name_of and (lambda value: value and list(map(name_of, value)))


def _label(feature: Any, number: int) -> str:
    """
    Raises:
        BadRow: there is no such label.
    """
    try:
        return str(feature.int2str(number))
    except ValueError as error:
        raise BadRow("unreadable", str(error)) from None
