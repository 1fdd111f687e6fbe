"""Files of a policy's checkpoint, and its settings file `policy.json`.

Only tables, weights and templates are downloaded. Code that comes with a checkpoint never reaches this machine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign, read_bytes
from armature.components.contracts.metrics import read_finite
from armature.components.machine.project import project_source
from armature.components.models.source import CHECKPOINT, CheckpointKind, locate
from armature.components.robots.policies.settings import RobotPolicySettings

CONFIG, POLICY_FILE = "config.json", "policy.json"
POLICY = CheckpointKind(
    name="policy",
    content=frozenset({".json", ".jinja", ".txt", ".safetensors"}),
    files={"allow_patterns": ["*.json", "*.jinja", "*.txt", "*.safetensors"]},
    fetched_whole=False,
    no_folder="give an existing folder or a hub name",
    no_revision="set the commit that the checkpoint's page shows under its history: policy.revision, "
    "policy.checkpoint_revision for a base, or policy.action_tokenizer_revision",
)
OF_CHECKPOINTS = ("path", "checkpoint_path", "revision", "checkpoint_revision", "norm_tag")
"""Settings that are about an existing checkpoint, and so contradict `policy.tiny`."""
SOURCES = (
    *("checkpoint_path", "path", "tiny", "revision", "checkpoint_revision"),
    *("action_tokenizer", "action_tokenizer_revision"),
)
"""Settings that say where parts of the policy come from; a written checkpoint contains these parts."""
MULTIPLES = (
    ("hidden_size", "heads", 2),  # rotary embeddings turn pairs of dimensions
    ("heads", "key_value_heads", 1),
    ("vision_hidden_size", "vision_heads", 1),
    ("expert_hidden_size", "expert_heads", 1),
)
"""Sizes of a tiny policy: the first setting has to be a multiple of the second one, times the factor."""
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


def self_contained(settings: RobotPolicySettings) -> RobotPolicySettings:
    """Return the settings of a checkpoint that contains all parts of the policy, without the sources of the parts."""
    return settings.model_copy(update=dict.fromkeys(SOURCES))


def first_settings(source: str | Path, *candidates: RobotPolicySettings | None) -> RobotPolicySettings:
    """Return the first settings of a policy in `source` that are not None.

    Raises:
        ConfigurationError: there are none.
    """
    if chosen := next((each for each in candidates if each is not None), None):
        return chosen
    raise ConfigurationError(
        "the checkpoint contains no policy settings",
        code="policy_settings_missing",
        where=str(source),
        remedy="pass settings, as for a released checkpoint or one of LeRobot",
    )


def policy_source(settings: RobotPolicySettings) -> str:
    """Return the folder or hub name of the policy's checkpoint; "" for a tiny or served policy.

    Raises:
        ConfigurationError: no source or more than one is set, the settings of a tiny policy contradict each other, or
            the folder of a LeRobot policy does not exist.
    """
    if settings.external is not None:
        folder = project_source(settings.lerobot.path) if settings.lerobot is not None else ""
        if folder and not Path(folder).is_dir():
            raise ConfigurationError(
                "the folder of the LeRobot policy does not exist",
                code="lerobot_folder_missing",
                where=f"policy.lerobot.path, {folder}",
                remedy="name a folder pretrained_model; for a hub repository: hf download NAME --local-dir FOLDER",
            )
        return folder
    if settings.tiny is None:
        if source := settings.path or settings.checkpoint_path:
            return project_source(source)
        raise ConfigurationError(
            "the recipe names no policy",
            code="policy_missing",
            where="policy",
            remedy="set one of policy.checkpoint_path, policy.path, policy.tiny, policy.server and policy.lerobot",
        )
    if other := next((name for name in OF_CHECKPOINTS if getattr(settings, name) is not None), None):
        raise ConfigurationError(
            f"policy.tiny makes a policy, and policy.{other} is about an existing one",
            code="policy_ambiguous",
            where=f"policy.tiny, policy.{other}",
            remedy=f"set only one of them; to drop an inherited one: extends = {{ file = ..., without = "
            f'["policy.{other}"] }}, or --set policy.{other}=',
        )
    for total, part, factor in MULTIPLES:
        if (size := getattr(settings.tiny, total)) % (factor * (count := getattr(settings.tiny, part))):
            raise ConfigurationError(
                f"{total} = {size} is not a multiple of {factor * count}",
                code="invalid_tiny_sizes",
                where=f"policy.tiny.{total}, policy.tiny.{part} = {count}",
                remedy=f"set policy.tiny.{total} to a multiple",
            )
    refuse_short_chunk(settings)
    return ""


def config_folder(source: str | None, revision: str | None) -> Path:
    """Return the folder of a policy's configuration, without weights if it is fetched from a hub.

    Raises:
        DataError: there is no configuration here, and the hub does not answer.
    """
    assert source is not None
    remedy = "use a folder that has the policy's config.json: --set policy.checkpoint_path=/a/folder"
    with foreign("the policy's configuration cannot be read", where=source, remedy=remedy):
        return locate(project_source(source), revision, POLICY_WITHOUT_WEIGHTS)


def refuse_short_chunk(settings: RobotPolicySettings) -> None:
    """Raise ConfigurationError if the policy executes more actions than it predicts."""
    if settings.n_action_steps > settings.chunk_size:
        raise ConfigurationError(
            f"{settings.n_action_steps} actions should be executed, but a chunk has only {settings.chunk_size}",
            code="chunk_too_short",
            where="policy.n_action_steps, policy.chunk_size",
            remedy=f"set n_action_steps to at most {settings.chunk_size}, or train with a larger chunk_size",
        )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        DataError: the file is missing, or is not a JSON object with finite numbers.
    """
    try:
        content = read_finite(read_bytes(file))
    except FileNotFoundError as error:
        raise DataError(
            "the checkpoint lacks this file",
            code="checkpoint_file_missing",
            where=str(file),
            remedy="use a policy's complete folder",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the file is not JSON with finite numbers: {error}", code="invalid_json", where=str(file)
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"the file is not a JSON object: {content!r:.80}", code="invalid_json", where=str(file))
    return content
