"""Digests of files, folders and documents.

Folders have the digest that DVC computes, so `dvc.lock`, MLflow and run pages all show the same one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import ConfigurationError


def file_digest(path: Path) -> str:
    """Return the MD5 of a file's bytes, which is also its name in DVC's cache."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def folder_digest(folder: Path) -> str:
    """Return the digest that DVC writes to `dvc.lock` for `folder`. File times and permissions do not change it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return listing_digest({path.relative_to(folder).as_posix(): file_digest(path) for path in files})


def listing_digest(files: Mapping[str, str]) -> str:
    """Return the digest of a folder whose files have these MD5 digests, followed by ".dir".

    `files` maps the relative path of each file to its MD5. The digest is the MD5 of the list of these pairs, sorted by
    path, as DVC writes it.
    """
    entries = [{"md5": files[name], "relpath": name} for name in sorted(files)]
    listing = json.dumps(entries, sort_keys=True).encode()
    return hashlib.md5(listing, usedforsecurity=False).hexdigest() + ".dir"


def document_digest(document: Any) -> str:
    """Return the SHA-256 of a JSON document in canonical form: sorted keys, no spaces.

    >>> document_digest({"b": 1, "a": 2}) == document_digest({"a": 2, "b": 1})
    True

    Raises:
        ConfigurationError: a number in it is not finite, or a value is not JSON.
    """
    refuse_non_finite(document)
    try:
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"a value has no JSON form: {error}", code="value_without_json", remedy="use tables, lists and scalars"
        ) from error
    return hashlib.sha256(canonical.encode()).hexdigest()


def refuse_non_finite(value: Any, where: str = "") -> None:
    """Check that all numbers in a nested document are finite.

    Raises:
        ConfigurationError: a number in `value`, however deep, is NaN or infinite; `where` is its dotted key.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(
            f"{value} is not a finite number", code="finite_number", where=where, remedy="give a finite number"
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_non_finite(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            refuse_non_finite(item, f"{where}[{index}]")
