"""The manifest of an artifact: what it is, what is in it, and what it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from armature.components.artifacts.record import Record, differences, scan_files
from armature.components.contracts.digests import document_digest, folder_digest, listing_digest
from armature.components.contracts.errors import DataError
from armature.components.contracts.installation import installed_version
from armature.components.contracts.settings import not_json
from armature.components.contracts.stages import Artifact

MANIFEST = "manifest.json"


class Manifest(BaseModel):
    """Written last into an artifact's folder. Holds no times, hosts or absolute paths: equal work, equal bytes.

    `content` is the digest of every other file; `inputs` maps input names to artifact digests, `sources`
    what else it depends on to digests; `settings` are the values that made it and `settings_digest` their SHA-256.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    manifest_version: Literal[1] = 1
    kind: str
    kind_version: int
    content: str
    rows: dict[str, int]
    drops: dict[str, int]
    inputs: dict[str, str]
    sources: dict[str, str] = {}
    settings: dict[str, Any]
    settings_digest: str
    code_version: str

    @field_validator("settings")
    @classmethod
    def _numbers_are_finite(cls, values: dict[str, Any]) -> dict[str, Any]:
        if problem := not_json(values, "settings"):
            raise ValueError(problem)
        return values


def write_manifest(
    folder: Path,
    *,
    kind: str,
    kind_version: int,
    rows: dict[str, int],
    drops: dict[str, int],
    inputs: dict[str, str],
    settings: dict[str, Any],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """Describe the finished files of `folder` in its manifest."""
    manifest = Manifest(
        kind=kind,
        kind_version=kind_version,
        content=folder_digest(folder),
        rows=rows,
        drops=drops,
        inputs=inputs,
        sources=dict(sources),
        settings=settings,
        settings_digest=document_digest(settings),
        code_version=installed_version(),
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        DataError: `folder` has no manifest or one that this version cannot read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            "this folder is not a finished artifact: it has no manifest.json",
            code="manifest_missing",
            where=str(folder),
            remedy="give the folder that a stage wrote, or run the stage again",
        )
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(
            f"the manifest cannot be read: {error.errors()[0]['msg']} at {error.errors()[0]['loc']}",
            code="manifest_unreadable",
            where=str(path),
            remedy="the artifact was written by another version of armature or damaged; run its stage again",
        ) from error


def verify_artifact(
    folder: Path,
    kind: str | None = None,
    known: Record | None = None,
    *,
    everything: bool = False,
    links: bool = False,
) -> Record:
    """What the files of the artifact in `folder` hold, after a comparison with its manifest.

    Args:
        kind: what it has to be.
        known: what it held; files that lie as it says are not read.
        everything: read them as well.
        links: see `scan_files`.

    Raises:
        DataError: not an artifact, of another kind, or with files that were changed, added or removed.
    """
    manifest = read_manifest(folder)
    if kind is not None and manifest.kind != kind:
        raise DataError(
            f"expected an artifact of kind {kind!r}, found {manifest.kind!r}",
            code="artifact_kind_mismatch",
            where=str(folder),
            remedy=f"give the folder that stage {kind!r} wrote",
        )
    record = scan_files(folder, None if everything else known, links)
    found = record.md5s
    content = listing_digest({name: md5 for name, md5 in found.items() if name != MANIFEST})
    if content != manifest.content or (known is not None and known.digest != record.digest):
        differ = differences(known.md5s, found) if known else ""
        raise DataError(
            f"files have changed since the artifact was made: {differ or f'content {content}'}, "
            f"manifest says {manifest.content}",
            code="artifact_changed",
            where=str(folder),
            remedy=f"artifacts are never edited in place; make it again: --force {manifest.kind}",
        )
    return record


def open_artifact(folder: Path, kind: str | None = None) -> Artifact:
    """The artifact in `folder`, every file read and checked against the manifest.

    Raises:
        DataError: see `verify_artifact`.
    """
    digest = verify_artifact(folder, kind, links=True).digest
    return Artifact(kind=read_manifest(folder).kind, path=folder, digest=digest)
