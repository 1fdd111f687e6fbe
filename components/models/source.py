"""Where a checkpoint lies: a hub name, a folder, or an artifact that holds one or refers to either."""

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
CHECKPOINT = "checkpoint"
"""The folder with the weights in the artifact of a stage that trains."""
ADAPTER = "adapter"
"""In it, where adapters were trained: these alone, as PEFT reads them. The weights beside it have them merged in."""


@dataclass(frozen=True)
class CheckpointKind:
    """What checkpoints of a kind consist of.

    name: of the stage and the settings that give one, for messages.
    content: Suffixes of the files that change what it computes; none are compared if it is empty.
    files: Arguments of `snapshot_download` that choose what is fetched.
    fetched_whole: A snapshot on this machine has all of these files.
    no_folder, no_revision: What to do where a source is neither folder nor hub name, or a hub name has no revision.
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
    no_folder="give an existing folder, a hub name, or tiny/<family>",
    no_revision="set model.revision to the commit that the model's page shows under its history",
)


class SourceReference(BaseModel):
    """What an artifact holds instead of the weights themselves.

    `commit` is the resolved commit of a hub name, None for a folder. The loader checks `checkpoint_sha256`, so that
    a changed folder is not taken for the old one.
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
    """Resolve a folder or a hub name, fetching the latter.

    Raises:
        ConfigurationError: a hub name without a revision.
        DataError: no such folder or repository, or it has no safetensors.
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
    """The digest of a folder of the recipe's, so that a changed one makes new artifacts; nothing of a hub name.

    Raises:
        DataError: see `locate` and `checkpoint_sha256`.
    """
    folder = Path(project_source(source))
    return {"checkpoint": checkpoint_sha256(locate(folder, kind=kind), kind.content)} if is_folder(folder) else {}


def locate(source: str | Path, revision: str | None = None, kind: CheckpointKind = MODEL) -> Path:
    """The folder with the weights of a folder, an artifact or a hub name; the last is fetched if missing.

    The artifact is one of the stage that `kind` names, or of a stage that trains.

    Raises:
        ConfigurationError: a hub name without a revision.
        DataError: no such folder or repository, or an artifact refers to a checkpoint that has changed since.
    """
    folder = Path(source)
    if not is_folder(folder):
        return _fetch(str(source), revision, kind)
    if (folder / CHECKPOINT).is_dir():
        return folder / CHECKPOINT
    if not (folder / REFERENCE).is_file():
        return folder
    remedy = f"remove the artifact and run the {kind.name} stage again"
    with foreign("the reference to a checkpoint cannot be followed", where=str(folder / REFERENCE), remedy=remedy):
        reference = SourceReference.model_validate_json(read_bytes(folder / REFERENCE))
        target = _kept(reference, kind) or locate(reference.source, reference.commit, kind)
    if kind.content and (found := checkpoint_sha256(target, kind.content)) != reference.checkpoint_sha256:
        raise DataError(
            f"the checkpoint is not the one that the artifact refers to: {found} is not {reference.checkpoint_sha256}",
            code="checkpoint_changed",
            where=f"{target}, referred to by {folder / REFERENCE}",
            remedy=f"put the old files back, or {remedy}",
        )
    return target


def checkpoint_sha256(folder: Path, content: frozenset[str] = MODEL.content) -> str:
    """SHA-256 over all that a checkpoint's results depend on: every shard, configuration, tokenizer and template.

    Files that no loader reads (`content` are the suffixes of those that one does), and hidden ones, do not count.

    Raises:
        DataError: there are no safetensors.
    """
    paths = {path.relative_to(folder): path for path in folder.rglob("*") if path.suffix in content and path.is_file()}
    found = {name.as_posix(): path for name, path in paths.items() if not any(part[0] == "." for part in name.parts)}
    if not any(name.endswith(".safetensors") for name in found):
        raise DataError(
            "no safetensors in the model folder",
            code="safetensors_missing",
            where=str(folder),
            remedy="convert the weights with save_pretrained; pickled weights are not loaded",
        )
    return document_digest({name: file_sha256(path) for name, path in found.items()})


def _kept(reference: SourceReference, kind: CheckpointKind) -> Path | None:
    """The snapshot that was fetched when the reference was made, if it is still here."""
    if reference.commit is not None and kind.fetched_whole:
        with suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(reference.source, revision=reference.commit, local_files_only=True))
    return None


def check_source_name(source: str, revision: str | None, kind: CheckpointKind = MODEL) -> None:
    """Refuse what is neither a folder nor the name and the revision of a hub's repository; nothing is fetched.

    Raises:
        ConfigurationError: a hub name without a revision.
        DataError: no such folder.
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


def _fetch(name: str, revision: str | None, kind: CheckpointKind) -> Path:
    check_source_name(name, revision, kind)
    return fetch_files(kind.name, name, revision, **kind.files)


def fetch_files(title: str, name: str, revision: str | None, **choice: Any) -> Path:
    """Return the folder of a hub repository's files; `choice` is what `snapshot_download` takes besides.

    Raises:
        DataError: they cannot be fetched; it calls them `title`.
    """
    try:
        return Path(snapshot_download(name, revision=revision, **choice))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise DataError(
            f"the {title} cannot be fetched: {str(error).splitlines()[0]}",
            code="repository_unavailable",
            where=f"{name} at {revision}",
            remedy="check the name and the revision, log in for a gated repository, or give a folder",
        ) from error


def local_code_options(trust_remote_code: bool) -> dict[str, Any]:
    """What every Auto class is told besides the folder: nothing is looked up on a network."""
    return {"trust_remote_code": trust_remote_code, "local_files_only": True}
