"""Files of a policy's checkpoint, and its settings file `policy.json`.

Only tables, weights and templates are downloaded. Code that comes with a checkpoint never reaches this machine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from armature.components.contracts.files import foreign, read_bytes
from armature.components.models.source import CHECKPOINT, CheckpointKind
from armature.components.robots.policies.settings import RobotPolicySettings

POLICY_FILE = "policy.json"
POLICY = CheckpointKind(
    name="policy",
    content=frozenset({".json", ".jinja", ".txt", ".safetensors"}),
    files={"allow_patterns": ["*.json", "*.jinja", "*.txt", "*.safetensors"]},
    fetched_whole=False,
    no_folder="give an existing folder or a hub name",
    no_revision="set the commit that the checkpoint's page shows under its history: policy.revision, "
    "policy.checkpoint_revision for a base, or policy.action_tokenizer_revision",
)
POLICY_WITHOUT_WEIGHTS = replace(POLICY, content=frozenset(), files={"allow_patterns": ["*.json", "*.jinja", "*.txt"]})


def has_policy(folder: Path) -> bool:
    """Return True if `folder` is a policy's checkpoint, or an artifact that contains one."""
    return any((place / POLICY_FILE).is_file() for place in (folder, folder / CHECKPOINT))


def write_settings(folder: Path, settings: RobotPolicySettings) -> None:
    """Write `settings` to `policy.json` in `folder`."""
    (folder / POLICY_FILE).write_text(settings.model_dump_json(indent=2) + "\n")


def read_settings(folder: Path) -> RobotPolicySettings | None:
    """Return the settings in `policy.json` of `folder`, or None if there is no such file.

    Raises:
        DataError: the file cannot be read.
    """
    file = folder / POLICY_FILE
    if not file.is_file():
        return None
    with foreign("the settings of the policy cannot be read", where=str(file)):
        return RobotPolicySettings.model_validate_json(read_bytes(file))
