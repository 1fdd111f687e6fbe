"""Where a model lies: a hub name, a folder, or an artifact that refers to either."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from pydantic import BaseModel, ConfigDict

from components.artifacts.cache import file_sha256
from components.artifacts.digests import document_digest
from components.contracts.errors import ConfigurationError, DataError

REFERENCE = "source.json"
CHECKPOINT = "checkpoint"
"""The folder with the weights in the artifact of a stage that trains."""
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")


CONTENT = frozenset({".safetensors", ".json", ".jinja", ".txt", ".model", ".py"})
"""Kinds of files in a checkpoint that change what it computes."""


class SourceReference(BaseModel):
    """What a model artifact holds instead of the weights themselves.

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


def make_reference(source: str, revision: str | None) -> SourceReference:
    """Resolve a folder or a hub name, fetching the latter.

    Raises:
        ConfigurationError: a hub name without a revision.
        DataError: no such folder or repository, or it has no safetensors.
    """
    folder = locate(source, revision)
    commit = None if Path(source).is_dir() else folder.name
    absolute = str(folder.resolve()) if commit is None else source
    return SourceReference(
        source=absolute, revision=revision, commit=commit, checkpoint_sha256=checkpoint_sha256(folder)
    )


def locate(source: str | Path, revision: str | None = None) -> Path:
    """The folder with the weights of a folder, an artifact or a hub name; the last is fetched if missing.

    The artifact is one of the stage `model` or of a stage that trains.

    Raises:
        ConfigurationError: a hub name without a revision.
        DataError: no such folder or repository, or an artifact refers to a checkpoint that has changed since.
    """
    folder = Path(source)
    if not folder.is_dir():
        return _fetch(str(source), revision, complete=False)
    if (folder / CHECKPOINT).is_dir():
        return folder / CHECKPOINT
    if not (folder / REFERENCE).is_file():
        return folder
    reference = SourceReference.model_validate_json((folder / REFERENCE).read_text())
    if reference.commit is None:
        target = locate(reference.source)
    else:
        target = _fetch(reference.source, reference.commit, complete=True)
    found = checkpoint_sha256(target)
    if found != reference.checkpoint_sha256:
        raise DataError(
            f"the checkpoint is not the one that the artifact refers to: {found} is not {reference.checkpoint_sha256}",
            where=f"{target}, referred to by {folder / REFERENCE}",
            remedy="put the old files back, or remove the artifact and run the model stage again",
        )
    return target


def checkpoint_sha256(folder: Path, kinds: frozenset[str] = CONTENT) -> str:
    """SHA-256 over all that a checkpoint's results depend on: every shard, configuration, tokenizer and template.

    Files that no loader reads (`kinds` are the suffixes of those that one does), and hidden ones, do not count.

    Raises:
        DataError: there are no safetensors.
    """
    paths = {path.relative_to(folder): path for path in folder.rglob("*") if path.suffix in kinds and path.is_file()}
    found = {name.as_posix(): path for name, path in paths.items() if not any(part[0] == "." for part in name.parts)}
    if not any(name.endswith(".safetensors") for name in found):
        raise DataError(
            "no safetensors in the model folder",
            where=str(folder),
            remedy="convert the weights with save_pretrained; pickled weights are not loaded",
        )
    return document_digest({name: file_sha256(path) for name, path in found.items()})


def _fetch(name: str, revision: str | None, complete: bool) -> Path:
    """The snapshot of a hub name; `complete`: it was fetched before, so look no further if it is there."""
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise DataError(
            "no such model folder", where=name, remedy="give an existing folder, a hub name, or tiny/<family>"
        )
    if revision is None:
        raise ConfigurationError(
            "a hub name needs a revision",
            where=f"model.source = {name!r}",
            remedy="set model.revision to the commit that the model's page shows under its history",
        )
    if complete:
        with suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=list(OTHER_WEIGHTS)))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise DataError(
            f"the model cannot be fetched: {str(error).splitlines()[0]}",
            where=f"{name} at {revision}",
            remedy="check the name and the revision, log in for a gated model, or give a folder",
        ) from error


def local_code_options(trust_remote_code: bool) -> dict[str, Any]:
    """What every Auto class is told besides the folder: nothing is looked up on a network."""
    return {"trust_remote_code": trust_remote_code, "local_files_only": True}
