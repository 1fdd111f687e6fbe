"""All of a policy's checkpoint but its weights: configuration, tokenizer, settings, statistics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign
from armature.components.machine.project import project_source
from armature.components.models.source import CHECKPOINT, locate
from armature.components.robots.policies.molmoact2.checkpoints.lerobot_layout import (
    BASE,
    is_lerobot,
    read_json,
    read_lerobot,
)
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.action_tokens import ActionTokens
from armature.components.robots.policies.molmoact2.processing.images import ImageLayout
from armature.components.robots.policies.molmoact2.processing.norm_stats import (
    NormStats,
    RobotMetadata,
    resolve,
    training_robot,
)
from armature.components.robots.policies.molmoact2.processing.processor import Processor
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.source import POLICY_WITHOUT_WEIGHTS, read_settings

CONFIG, PROCESSOR_CONFIG, ACTION_TOKENIZER = "config.json", "processor_config.json", "action_tokenizer"


@dataclass(frozen=True)
class PolicyParts:
    """All of a checkpoint but its weights.

    settings: with what a norm_tag or a LeRobot checkpoint says filled in.
    stats: the checkpoint's file with all its tags.
    robot: whose statistics normalize; None where neither checkpoint nor dataset says.
    action_tokens: None where the checkpoint has no tokenizer for discrete actions and the settings name none.
    layout: how images become patches.
    files: the folder of those files that pass on unchanged (tokenizer, image processor, templates).
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
        """Turns observations into the model's inputs, and its answers into actions.

        Args:
            horizon: Actions of an example, where robots with longer chunks are trained too; None: the chunk.

        Raises:
            ConfigurationError: no statistics are known.
        """
        if self.robot is None:
            raise ConfigurationError(
                "the policy knows no statistics to normalize by",
                code="normalization_statistics_missing",
                where=str(self.files),
                remedy="set policy.norm_tag to an entry of the checkpoint's norm_stats.json, or train on a dataset",
            )
        return Processor(
            self.config, self.tokenizer, self.settings, self.robot, self.layout, self.action_tokens, horizon
        )


def load_parts(
    source: str | Path, settings: RobotPolicySettings | None = None, robot: RobotMetadata | None = None
) -> PolicyParts:
    """Read everything but the weights.

    Args:
        source: A checkpoint folder, an artifact of a stage that makes or trains policies, or a hub name.
        settings: None takes those that were saved with the checkpoint.
        robot: Metadata and statistics of the dataset that is trained on. They win over those of the checkpoint, but
            not over a norm_tag in the settings under the semantics "head". The settings are taken as they are then,
            also for a checkpoint of LeRobot's, whose own complete them otherwise.

    Raises:
        ConfigurationError: no settings anywhere, or a hub name without a revision.
        DataError: a file is missing or wrong, or there is no such norm_tag.
    """
    saved = _saved_settings(source, settings)
    chosen = settings or saved
    if chosen is None:
        raise ConfigurationError(
            "the checkpoint was saved without settings",
            code="policy_settings_missing",
            where=str(source),
            remedy="give the policy's settings, as for a released checkpoint",
        )
    base = locate(source, chosen.revision, POLICY_WITHOUT_WEIGHTS)
    own: RobotMetadata | None = None
    if is_lerobot(base):
        lerobot = read_lerobot(base, chosen)
        base, own = lerobot.base, lerobot.robot
        chosen = lerobot.settings if robot is None else chosen
    config = MolmoAct2Config.from_dict(read_json(base / CONFIG), str(base / CONFIG))
    file = base / config.norm_stats_filename
    stats = NormStats.load(file) if file.is_file() else None
    if robot is not None and not chosen.norm_tag:
        own = robot
    elif tag := chosen.norm_tag or (saved.norm_tag if saved and own is None else None):
        own = NormStats.load(file).select(tag)
        chosen = resolve(chosen, own, robot.camera_keys if robot is not None else None).model_copy(
            update={"norm_tag": tag}
        )
        own = own if robot is None else training_robot(chosen, own, robot)
    if chosen.chunk_size > config.max_action_horizon:
        config = config.model_copy(update={"max_action_horizon": chosen.chunk_size})
    with foreign("the image processor's settings cannot be read", where=str(base / PROCESSOR_CONFIG)):
        layout = ImageLayout.from_processor_config(read_json(base / PROCESSOR_CONFIG))
    return PolicyParts(config, _tokenizer(base), chosen, stats, own, _action_tokens(base, chosen), layout, base)


def _saved_settings(source: str | Path, settings: RobotPolicySettings | None) -> RobotPolicySettings | None:
    """What was saved in an artifact, in the checkpoint of one, or beside the files of a LeRobot checkpoint's base."""
    folder = Path(source)
    if not folder.is_dir():
        folder = locate(source, settings.revision if settings else None, POLICY_WITHOUT_WEIGHTS)
    found = (read_settings(place) for place in (folder, folder / CHECKPOINT, folder / BASE))
    return next((one for one in found if one is not None), None)


def _tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            "no tokenizer.json",
            code="checkpoint_file_missing",
            where=str(folder),
            remedy="complete the folder with its tokenizer",
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
