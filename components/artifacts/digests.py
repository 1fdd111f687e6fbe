"""One digest everywhere: the one that DVC computes, so that `dvc.lock`, MLflow and a run page show the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def file_digest(path: Path) -> str:
    """MD5 of a file's bytes, as DVC names files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def folder_digest(folder: Path, leave_out: frozenset[str] = frozenset()) -> str:
    """The digest that DVC writes to `dvc.lock` for `folder`: MD5 over the sorted (md5, relpath) list.

    `leave_out` are paths relative to `folder`. File times and permissions do not count.
    """
    paths = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
    entries = [{"md5": file_digest(path), "relpath": name} for name, path in paths if name not in leave_out]
    listing = json.dumps(entries, sort_keys=True).encode()
    return hashlib.md5(listing, usedforsecurity=False).hexdigest() + ".dir"


def document_digest(document: Any) -> str:
    """SHA-256 of a JSON document in canonical form."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
