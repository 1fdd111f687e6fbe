"""Finding a checkpoint: by hub name, by folder, or in an artifact that contains or references one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from pydantic import BaseModel, ConfigDict

from armature.components.artifacts.cache import file_sha256
from armature.components.contracts.digests import document_digest
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign, is_folder, read_bytes
from armature.components.machine.project import project_source

REFERENCE = "source.json"
"""File of an artifact that references a checkpoint elsewhere."""
CHECKPOINT = "checkpoint"
"""Folder of the weights in the artifact of a training stage."""
ADAPTER = "adapter"
"""Folder inside CHECKPOINT with the trained adapters alone, in PEFT's format. The weights beside it have them merged
in."""


@dataclass(frozen=True)
class CheckpointKind:
    """The files that belong to checkpoints of one kind, such as models or robot policies.

    Attributes:
        name: name of the stage and of the settings that give such a checkpoint, for messages.
        content: suffixes of the files that affect results; with an empty set, files are not compared.
        files: arguments of `snapshot_download` that select the files to fetch.
        fetched_whole: True if a snapshot on this machine always has all selected files.
        no_folder: remedy if a source is neither a folder nor a hub name.
        no_revision: remedy if a hub name has no revision.
    """

    name: str
    content: frozenset[str]
    files: Mapping[str, Any]
    fetched_whole: bool
    no_folder: str
    no_revision: str


MODEL = CheckpointKind(
    name="model",
    content=frozenset({".safetensors", ".json", ".jinja", ".txt", ".model", ".py"}),
    files={"ignore_patterns": ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack"]},
    fetched_whole=True,
    no_folder="name an existing folder, a hub name, or tiny/<family>",
    no_revision="set model.revision to the commit that the model's page shows under its history",
)
"""Checkpoints of vision-language models."""


class SourceReference(BaseModel):
    """Reference to a checkpoint, which an artifact contains in place of the weights.

    Attributes:
        source: hub name or absolute folder.
        revision: the revision of the recipe.
        commit: the resolved commit of a hub name; None for a folder.
        checkpoint_sha256: digest of the checkpoint's files. The loader compares it, so a changed folder is noticed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    revision: str | None
    commit: str | None
    checkpoint_sha256: str

    def write(self, folder: Path) -> None:
        """Write the reference into an artifact folder."""
        (folder / REFERENCE).write_text(json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n")


def make_reference(source: str, revision: str | None, kind: CheckpointKind = MODEL) -> SourceReference:
    """Return a reference to a folder or a hub name; the latter is fetched.

    Raises:
        ConfigurationError: a hub name has no revision.
        DataError: the folder or repository does not exist, or has no safetensors files.
    """
    folder = locate(source, revision, kind)
    commit = None if is_folder(source) else folder.name
    return SourceReference(
        source=str(folder.resolve()) if commit is None else source,
        revision=revision,
        commit=commit,
        checkpoint_sha256=checkpoint_sha256(folder, kind.content),
    )


def folder_sources(source: str, kind: CheckpointKind = MODEL) -> dict[str, str]:
    """Return the digest of a checkpoint folder named in a recipe, so that a changed folder gives new artifacts; {} for
    a hub name.

    Raises:
        DataError: see `locate` and `checkpoint_sha256`.
    """
    folder = Path(project_source(source))
    return {"checkpoint": checkpoint_sha256(locate(folder, kind=kind), kind.content)} if is_folder(folder) else {}


def locate(source: str | Path, revision: str | None = None, kind: CheckpointKind = MODEL) -> Path:
    """Return the folder with the weights, given a folder, an artifact or a hub name. A hub name is fetched if
    necessary.

    The artifact is one of the stage `kind.name` or of a training stage.

    Raises:
        ConfigurationError: a hub name has no revision.
        DataError: the folder or repository does not exist, or the checkpoint that an artifact references has changed.
    """
    folder = Path(source)
    if not is_folder(folder):
        check_source_name(str(source), revision, kind)
        return fetch_files(kind.name, str(source), revision, **kind.files)
    if (folder / CHECKPOINT).is_dir():
        return folder / CHECKPOINT
    if not (folder / REFERENCE).is_file():
        return folder
    remedy = f"remove the artifact and run the {kind.name} stage again"
    with foreign("the reference to a checkpoint cannot be followed", where=str(folder / REFERENCE), remedy=remedy):
        reference = SourceReference.model_validate_json(read_bytes(folder / REFERENCE))
        target = _fetched_snapshot(reference, kind) or locate(reference.source, reference.commit, kind)
    if kind.content and (digest := checkpoint_sha256(target, kind.content)) != reference.checkpoint_sha256:
        raise DataError(
            f"the checkpoint has changed since the artifact was made: {digest} is not {reference.checkpoint_sha256}",
            code="checkpoint_changed",
            where=f"{target}, referred to by {folder / REFERENCE}",
            remedy=f"put the old files back, or {remedy}",
        )
    return target


def checkpoint_sha256(folder: Path, content: frozenset[str] = MODEL.content) -> str:
    """SHA-256 of all files that affect a checkpoint's results: shards, configuration, tokenizer and chat template.

    Hidden files and files whose suffix is not in `content` do not count.

    Raises:
        DataError: there are no safetensors files.
    """
    paths = {path.relative_to(folder): path for path in folder.rglob("*") if path.suffix in content and path.is_file()}
    visible = {name.as_posix(): path for name, path in paths.items() if not any(part[0] == "." for part in name.parts)}
    if not any(name.endswith(".safetensors") for name in visible):
        raise DataError(
            "no safetensors in the model folder",
            code="safetensors_missing",
            where=str(folder),
            remedy="convert the weights with save_pretrained; pickled weights are not loaded",
        )
    return document_digest({name: file_sha256(path) for name, path in visible.items()})


def _fetched_snapshot(reference: SourceReference, kind: CheckpointKind) -> Path | None:
    """Return the folder of the snapshot that was fetched when the reference was made, or None if it is not on this
    machine."""
    if reference.commit is not None and kind.fetched_whole:
        with suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(reference.source, revision=reference.commit, local_files_only=True))
    return None


def check_source_name(source: str, revision: str | None, kind: CheckpointKind = MODEL) -> None:
    """Check that a source is a folder, or a hub name with a revision. Nothing is fetched.

    Raises:
        ConfigurationError: a hub name has no revision.
        DataError: the folder does not exist.
    """
    if is_folder(source):
        return
    if source.count("/") != 1 or source.startswith(("/", ".", "~")):
        raise DataError(
            f"no such {kind.name} folder", code="checkpoint_folder_missing", where=source, remedy=kind.no_folder
        )
    if revision is None:
        raise ConfigurationError(
            "a hub name needs a revision",
            code="revision_missing",
            where=f"{kind.name}: {source!r}",
            remedy=kind.no_revision,
        )


def fetch_files(title: str, name: str, revision: str | None, **choice: Any) -> Path:
    """Fetch files of a hub repository and return their folder.

    Args:
        title: what the files are, for errors.
        choice: further arguments of `snapshot_download`.

    Raises:
        DataError: the files cannot be fetched.
    """
    try:
        return Path(snapshot_download(name, revision=revision, **choice))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise DataError(
            f"the {title} cannot be fetched: {str(error).splitlines()[0]}",
            code="repository_unavailable",
            where=f"{name} at {revision}",
            remedy="check the name and the revision, log in for a gated repository, or name a folder",
        ) from error


def local_code_options(trust_remote_code: bool) -> dict[str, Any]:
    """Return the keyword arguments for every `from_pretrained` of a local folder. They say whether code is trusted, and
    that nothing is fetched."""
    return {"trust_remote_code": trust_remote_code, "local_files_only": True}
