"""Read a policy's checkpoint without its weights: configuration, tokenizer, settings, statistics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import foreign
from armature.components.machine.project import project_source
from armature.components.models.source import CHECKPOINT, locate
from armature.components.robots.policies.inputs import require_robot
from armature.components.robots.policies.molmoact2.checkpoints.lerobot_layout import (
    BASE,
    is_lerobot,
    read_lerobot,
)
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.action_tokens import ActionTokens
from armature.components.robots.policies.molmoact2.processing.images import ImageLayout
from armature.components.robots.policies.molmoact2.processing.processor import Processor
from armature.components.robots.policies.norm_stats import (
    NormStats,
    RobotMetadata,
    resolve,
    training_robot,
)
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.source import (
    CONFIG,
    POLICY_WITHOUT_WEIGHTS,
    first_settings,
    read_json,
    read_settings,
)

PROCESSOR_CONFIG, ACTION_TOKENIZER = "processor_config.json", "action_tokenizer"


@dataclass(frozen=True)
class PolicyParts:
    """Everything in a checkpoint except its weights.

    settings: the policy's settings, completed by the entry `norm_tag` or by the settings of a LeRobot checkpoint.
    stats: the checkpoint's norm_stats.json with all its tags; None if it has no such file.
    robot: metadata and statistics to normalize by; None if neither the checkpoint nor a dataset provides them.
    action_tokens: None if the checkpoint has no action tokenizer and the settings name none.
    layout: geometry of images and patches.
    files: folder with the files that `write_parts` copies unchanged (tokenizer, image processor, templates).
    """

    config: MolmoAct2Config
    tokenizer: PreTrainedTokenizerFast
    settings: RobotPolicySettings
    stats: NormStats | None
    robot: RobotMetadata | None
    action_tokens: ActionTokens | None
    layout: ImageLayout
    files: Path

    def processor(self, horizon: int | None = None) -> Processor:
        """Return the processor, which encodes observations and decodes predictions.

        Args:
            horizon: Number of actions of an example, if robots with longer chunks are trained too; None: chunk_size.

        Raises:
            ConfigurationError: `robot` is None.
        """
        robot = require_robot(self.robot, self.files)
        return Processor(self.config, self.tokenizer, self.settings, robot, self.layout, self.action_tokens, horizon)


def load_parts(
    source: str | Path, settings: RobotPolicySettings | None = None, robot: RobotMetadata | None = None
) -> PolicyParts:
    """Read everything but the weights.

    Args:
        source: A checkpoint folder, an artifact of a stage that makes or trains policies, or a hub name.
        settings: The policy's settings; None: those saved with the checkpoint.
        robot: Metadata and statistics of the dataset to train on. They replace the checkpoint's, except for a norm_tag
            in the settings with the semantics "head". With `robot`, `settings` are used unchanged; without it, settings
            in a LeRobot checkpoint complete them.

    Raises:
        ConfigurationError: there are no settings, a hub name has no revision, or norm_tag is unknown.
        DataError: a file is missing or invalid.
    """
    saved = _saved_settings(source, settings)
    chosen = first_settings(source, settings, saved)
    base = locate(source, chosen.revision, POLICY_WITHOUT_WEIGHTS)
    metadata: RobotMetadata | None = None
    if is_lerobot(base):
        lerobot = read_lerobot(base, chosen)
        base, metadata = lerobot.base, lerobot.robot
        chosen = lerobot.settings if robot is None else chosen
    config = MolmoAct2Config.from_dict(read_json(base / CONFIG), str(base / CONFIG))
    file = base / config.norm_stats_filename
    stats = NormStats.load(file) if file.is_file() else None
    if robot is not None and not chosen.norm_tag:
        metadata = robot
    elif tag := chosen.norm_tag or (saved.norm_tag if saved and metadata is None else None):
        metadata = NormStats.load(file).select(tag)
        chosen = resolve(chosen, metadata, robot.camera_keys if robot is not None else None)
        chosen = chosen.model_copy(update={"norm_tag": tag})
        metadata = metadata if robot is None else training_robot(chosen, metadata, robot)
    if chosen.chunk_size > config.max_action_horizon:
        config = config.model_copy(update={"max_action_horizon": chosen.chunk_size})
    with foreign("the image processor's settings cannot be read", where=str(base / PROCESSOR_CONFIG)):
        layout = ImageLayout.from_processor_config(read_json(base / PROCESSOR_CONFIG))
    return PolicyParts(config, _tokenizer(base), chosen, stats, metadata, _action_tokens(base, chosen), layout, base)


def _saved_settings(source: str | Path, settings: RobotPolicySettings | None) -> RobotPolicySettings | None:
    """Return the policy's settings saved in `source`; None if it has no file policy.json.

    The file is looked for in `source` itself, in its `checkpoint/`, and in the `base/` of a LeRobot checkpoint.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = locate(source, settings.revision if settings else None, POLICY_WITHOUT_WEIGHTS)
    saved = (read_settings(place) for place in (folder, folder / CHECKPOINT, folder / BASE))
    return next((each for each in saved if each is not None), None)


def _tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            "the checkpoint has no tokenizer.json",
            code="checkpoint_file_missing",
            where=str(folder),
            remedy="add the checkpoint's tokenizer to the folder",
        )
    with foreign("the tokenizer cannot be read", where=str(folder), remedy="use the checkpoint's own files"):
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return tokenizer


def _action_tokens(folder: Path, settings: RobotPolicySettings) -> ActionTokens | None:
    if settings.action_tokenizer is not None:
        source = project_source(settings.action_tokenizer)
        return ActionTokens.load(locate(source, settings.action_tokenizer_revision, POLICY_WITHOUT_WEIGHTS))
    inside = folder / ACTION_TOKENIZER
    return ActionTokens.load(inside) if inside.is_dir() else None
