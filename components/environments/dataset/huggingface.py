"""Datasets that Hugging Face's library `datasets` reads: from the hub at a commit, or saved on disk."""

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
"""Names of files that mark a folder written by `save_to_disk`."""


def dataset_commit(name: str, revision: str | None) -> str:
    """Return the commit of a hub dataset's revision.

    Raises:
        ConfigurationError: `revision` is None.
        DataError: there is no such dataset or revision, or the hub cannot be reached.
    """
    return hub_commit(name, refuse_no_revision(name, revision), "dataset").commit


def refuse_no_revision(name: str, revision: str | None) -> str:
    """Return the revision of a hub dataset.

    Raises:
        ConfigurationError: `revision` is None.
    """
    if revision is None:
        raise ConfigurationError(
            "a hub name needs a revision",
            code="revision_missing",
            where=f"environment.args.source = {name!r}, which is not a file or a folder here",
            remedy="set environment.args.revision to the commit that the dataset's page shows under its history",
        )
    return revision


def hub_shards(name: str, commit: str, subset: str) -> list[Shard]:
    """Load a dataset of the hub at a commit and return one shard per split.

    Raises:
        ConfigurationError: the library `datasets` is not installed.
        DataError: the dataset or subset cannot be fetched or read.
    """
    library = _library()
    _check_size(name, commit)
    return _shards(
        lambda: library.load_dataset(name, subset or None, revision=commit),
        f"{name} at {commit}",
        "check its name and environment.args.subset; log in for a gated dataset",
    )


def _check_size(name: str, commit: str) -> None:
    """Check that a hub dataset is not larger than the download limit. The library itself has no limit.

    Raises:
        DataError: the dataset is larger.
    """
    from huggingface_hub import HfApi

    size, limit = 0, DownloadCache.standard().limit_bytes
    with suppress(Exception):  # offline, the library reads its cache; it reports all other problems itself
        files = HfApi().list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
        size = sum(getattr(file, "size", 0) for file in files)
    if size > limit:
        raise DataError(
            f"the dataset has {size / 1e9:.3g} GB, more than the limit of {limit / 1e9:.3g} GB",
            code="fetch_limit_exceeded",
            where=f"{name} at {commit}",
            remedy="raise ARMATURE_FETCH_LIMIT_GB, or use a smaller dataset",
        )


def saved_shards(folder: Path) -> list[Shard]:
    """Load a dataset from a folder that `save_to_disk` wrote, and return one shard per split.

    Raises:
        ConfigurationError: the library `datasets` is not installed.
        DataError: the dataset cannot be read.
    """
    library = _library()
    return _shards(
        lambda: library.load_from_disk(str(folder)), str(folder), "write it again with save_to_disk of datasets"
    )


def _library() -> Any:
    if find_spec("datasets") is None:
        raise ConfigurationError(
            "a Hugging Face dataset needs the package datasets",
            code="package_missing",
            remedy=install_command("huggingface"),
        )
    import datasets

    return datasets


def _shards(load: Callable[[], Any], where: str, remedy: str) -> list[Shard]:
    try:
        dataset = load()
    except Exception as error:  # of the network, the hub, or any library that reads the files
        raise DataError(
            f"the dataset cannot be loaded: {type(error).__name__}: {str(error)[:500]}",
            code="dataset_unreadable",
            where=where,
            remedy=remedy,
        ) from error
    splits: Mapping[str, Any] = dataset if isinstance(dataset, Mapping) else {str(dataset.split or "train"): dataset}
    return [split_rows(name, splits[name]) for name in sorted(splits)]


def split_rows(name: str, rows: Any) -> ArrowRows:
    """Return a split as a shard, with class labels as names, also inside lists and structs."""
    stored = rows.with_format("arrow")
    labels = {key: label_reader(feature) for key, feature in rows.features.items()}

    def values(key: str, column: pa.ChunkedArray) -> list[Any]:
        plain, with_names = column_values(column), labels[key]
        return plain if with_names is None else list(map(with_names, plain))

    return ArrowRows(name, len(rows), rows.column_names, lambda start, stop: stored[start:stop], values)


def label_reader(feature: Any) -> Callable[[Any], Any] | None:
    """Return a function that replaces class labels' numbers in a value by names; None if the feature has no labels."""
    if hasattr(feature, "int2str"):
        return lambda value: None if value is None or value < 0 else _label(feature, value)
    if isinstance(feature, Mapping):
        fields = {key: each for key, inner in feature.items() if (each := label_reader(inner))}
        if not fields:
            return None
        return lambda value: value and value | {key: each(value[key]) for key, each in fields.items()}
    with_names = label_reader(feature.feature) if hasattr(feature, "feature") else None
    return with_names and (lambda value: value and list(map(with_names, value)))


def _label(feature: Any, number: int) -> str:
    """Return the name of a class label.

    Raises:
        BadRow: there is no label of this number.
    """
    try:
        return str(feature.int2str(number))
    except ValueError as error:
        raise BadRow("unreadable", str(error)) from None
