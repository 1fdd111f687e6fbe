"""The manifest of an artifact: its kind, its number of rows, its inputs and the settings that produced it."""

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
    """Description of an artifact, written into its folder last.

    A manifest contains no times, host names or absolute paths, so the same work always gives the same bytes.

    Attributes:
        kind: the stage that produced the artifact.
        kind_version: version of the stage's output.
        content: digest of every other file.
        rows: number of rows of each table.
        drops: number of left-out rows or episodes, by reason.
        inputs: digest of each input artifact, by the input's name.
        sources: digests of everything else the result depends on, such as code and files.
        settings: the values that the result was made with.
        settings_digest: SHA-256 of the settings.
        code_version: version of armature.
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
    """Write the manifest of the finished files in `folder` and return it; see `Manifest` for the arguments."""
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
    """Read the manifest of the artifact in `folder`.

    Raises:
        DataError: the folder has no manifest, or this version cannot read it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            "this folder is not a finished artifact: it has no manifest.json",
            code="manifest_missing",
            where=str(folder),
            remedy="pass the folder that a stage wrote, or run the stage again",
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
    previous: Record | None = None,
    *,
    everything: bool = False,
    links: bool = False,
) -> Record:
    """Check the files of the artifact in `folder` against its manifest. Return the MD5 and state of each file.

    Args:
        kind: the kind that the artifact must have; None accepts any.
        previous: an earlier record of the artifact; files whose state has not changed since then are not read.
        everything: read all files, also the unchanged ones.
        links: see `scan_files`.

    Raises:
        DataError: the folder is not an artifact, is of another kind, or its files were changed, added or removed.
    """
    manifest = read_manifest(folder)
    if kind is not None and manifest.kind != kind:
        raise DataError(
            f"expected an artifact of kind {kind!r}, found {manifest.kind!r}",
            code="artifact_kind_mismatch",
            where=str(folder),
            remedy=f"pass a folder that stage {kind!r} wrote",
        )
    record = scan_files(folder, None if everything else previous, links)
    content = listing_digest({name: md5 for name, md5 in record.md5s.items() if name != MANIFEST})
    if content != manifest.content or (previous is not None and previous.digest != record.digest):
        differ = differences(previous.md5s, record.md5s) if previous else ""
        raise DataError(
            f"files have changed since the artifact was made: {differ or f'content {content}'}; "
            f"the manifest has content {manifest.content}",
            code="artifact_changed",
            where=str(folder),
            remedy=f"artifacts are never edited in place; make it again: --force {manifest.kind}",
        )
    return record


def open_artifact(folder: Path, kind: str | None = None) -> Artifact:
    """Return the artifact in `folder` after reading every file and checking it against the manifest.

    Raises:
        DataError: see `verify_artifact`.
    """
    digest = verify_artifact(folder, kind, links=True).digest
    return Artifact(kind=read_manifest(folder).kind, path=folder, digest=digest)
