"""Where a policy's checkpoint lies: a folder, a hub name, or an artifact that holds one or refers to one.

Only tables, weights and templates are fetched: code that comes with a checkpoint is never on this machine.
"""

from __future__ import annotations

from pathlib import Path

from components.contracts.errors import ConfigurationError, DataError
from components.models.source import CHECKPOINT, REFERENCE, SourceReference, checkpoint_sha256
from components.policies.settings import RobotPolicySettings

POLICY_FILE = "policy.json"
SMALL_FILES = ("*.json", "*.jinja", "*.txt")
WEIGHT_FILES = ("*.safetensors",)
CONTENT = frozenset(Path(pattern).suffix for pattern in (*SMALL_FILES, *WEIGHT_FILES))


def locate_policy(source: str | Path, revision: str | None = None, weights: bool = True) -> Path:
    """The folder with the checkpoint of a folder, an artifact or a hub name; the last is fetched if missing.

    Args:
        weights: False fetches no more than what describes them.

    Raises:
        ConfigurationError: a hub name without a revision.
        DataError: no such folder or repository, or an artifact refers to a checkpoint that has changed since.
    """
    folder = Path(source)
    if not folder.is_dir():
        return _fetch(str(source), revision, weights)
    if (folder / CHECKPOINT).is_dir():
        return folder / CHECKPOINT
    if not (folder / REFERENCE).is_file():
        return folder
    reference = SourceReference.model_validate_json((folder / REFERENCE).read_text())
    target = locate_policy(reference.source, reference.commit, weights)
    if weights and (found := checkpoint_sha256(target, CONTENT)) != reference.checkpoint_sha256:
        raise DataError(
            f"the checkpoint is not the one that the artifact refers to: {found} is not {reference.checkpoint_sha256}",
            where=f"{target}, referred to by {folder / REFERENCE}",
            remedy="put the old files back, or remove the artifact and run the policy stage again",
        )
    return target


def refer(source: str, revision: str | None) -> SourceReference:
    """What an artifact holds instead of a checkpoint that lies elsewhere; a hub name is fetched.

    Raises:
        ConfigurationError: a hub name without a revision.
        DataError: no such folder or repository, or it has no safetensors.
    """
    folder = locate_policy(source, revision)
    commit = None if Path(source).is_dir() else folder.name
    name = source if commit else str(folder.resolve())
    digest = checkpoint_sha256(folder, CONTENT)
    return SourceReference(source=name, revision=revision, commit=commit, checkpoint_sha256=digest)


def write_settings(folder: Path, settings: RobotPolicySettings) -> None:
    (folder / POLICY_FILE).write_text(settings.model_dump_json(indent=2) + "\n")


def read_settings(folder: Path) -> RobotPolicySettings | None:
    """What `write_settings` wrote into `folder`, if it did."""
    file = folder / POLICY_FILE
    return RobotPolicySettings.model_validate_json(file.read_text()) if file.is_file() else None


def _fetch(name: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise DataError("no such policy folder", where=name, remedy="give an existing folder or a hub name")
    if revision is None:
        raise ConfigurationError(
            "a hub name needs a revision",
            where=f"policy: {name!r}",
            remedy="set the commit that the checkpoint's page shows under its history: policy.revision, "
            "policy.checkpoint_revision for a base, or policy.action_tokenizer_revision",
        )
    patterns = [*SMALL_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise DataError(
            f"the policy cannot be fetched: {str(error).splitlines()[0]}",
            where=f"{name} at {revision}",
            remedy="check the name and the revision, log in for a gated checkpoint, or give a folder",
        ) from error
