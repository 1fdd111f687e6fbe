"""One digest everywhere: the one that DVC computes, so that `dvc.lock`, MLflow and a run page show the same."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import ConfigurationError


def file_digest(path: Path) -> str:
    """MD5 of a file's bytes, as DVC names files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def folder_digest(folder: Path) -> str:
    """The digest that DVC writes to `dvc.lock` for `folder`. File times and permissions do not count."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return listing_digest({path.relative_to(folder).as_posix(): file_digest(path) for path in files})


def listing_digest(files: Mapping[str, str]) -> str:
    """MD5 over the (md5, relpath) list of a folder's files, sorted by relpath; `files` maps relpath to md5."""
    entries = [{"md5": files[name], "relpath": name} for name in sorted(files)]
    listing = json.dumps(entries, sort_keys=True).encode()
    return hashlib.md5(listing, usedforsecurity=False).hexdigest() + ".dir"


def document_digest(document: Any) -> str:
    """SHA-256 of a JSON document in canonical form.

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
    """
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
