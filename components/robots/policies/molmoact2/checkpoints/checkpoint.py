"""Read and write a policy's checkpoint with its weights, in the released layout or in LeRobot's.

Reading is strict: every weight must be present, known and of the right shape. A checkpoint that we write needs no other
files. It has the released files, `policy.json` with the settings, and `action_tokenizer/`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from armature.components.artifacts.tensors import new_checkpoint_folder
from armature.components.models.blockwise import FP8Linear
from armature.components.models.load import without_storage
from armature.components.models.source import locate
from armature.components.robots.policies.family import load_model
from armature.components.robots.policies.molmoact2.checkpoints.lerobot_layout import (
    BASE,
    LeRobotTensors,
    is_lerobot,
    write_processors,
)
from armature.components.robots.policies.molmoact2.checkpoints.parts import (
    ACTION_TOKENIZER,
    PolicyParts,
    load_parts,
)
from armature.components.robots.policies.molmoact2.checkpoints.weights import (
    SHARD_BYTES,
    load_weights,
    read_weights,
    write_released,
)
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.processing.processor import Processor
from armature.components.robots.policies.norm_stats import (
    FeatureNormStats,
    Normalizer,
    RobotMetadata,
    norm_stats,
)
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.source import CONFIG, POLICY, self_contained, write_settings
from armature.components.robots.policies.tensors import TensorFiles, load_value_head, save_value_head

TRAINED_TAG = "trained"
"""Tag under which a dataset's statistics are saved if the settings have no norm_tag."""
RELEASED = "allenai/MolmoAct2"
"""Hub name of the released policy, whose tokenizer and image processor LeRobot needs."""
UNCHANGED_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)


@dataclass(frozen=True)
class LoadedPolicy:
    """A model in evaluation mode, with the other parts of its checkpoint."""

    model: MolmoAct2
    parts: PolicyParts

    @property
    def config(self) -> MolmoAct2Config:
        """The model's configuration."""
        return self.parts.config

    @property
    def settings(self) -> RobotPolicySettings:
        """The policy's settings."""
        return self.parts.settings

    def processor(self) -> Processor:
        """Return the policy's processor; see `PolicyParts.processor`."""
        return self.parts.processor()


def load_policy(
    source: str | Path,
    settings: RobotPolicySettings | None = None,
    robot: RobotMetadata | None = None,
    device: str | torch.device = "cpu",
) -> LoadedPolicy:
    """Load a policy with its weights to `device`; for the other arguments see `load_parts`.

    `settings.dtype` determines the dtypes of the weights; see `MolmoAct2`.

    Raises:
        ConfigurationError, DataError: see `load_parts`; or a weight is missing, unknown, or has another shape.

    Example:
        >>> import tempfile
        >>> from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy
        >>> from armature.components.robots.policies.settings import TinyPolicySettings
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     make_tiny_policy(Path(folder) / "checkpoint", RobotPolicySettings(tiny=TinyPolicySettings(layers=1)))
        ...     load_policy(Path(folder) / "checkpoint").config.text_config.num_hidden_layers
        PosixPath('.../checkpoint')
        1
    """
    parts = load_parts(source, settings, robot)
    return LoadedPolicy(load_model(source, parts, device), parts)


def empty_model(parts: PolicyParts) -> MolmoAct2:
    """Return the model of `parts` on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return MolmoAct2(parts.config, parts.settings.dtype, parts.settings.llm_residual_dropout).eval()


def read_model(source: str | Path, parts: PolicyParts) -> tuple[MolmoAct2, dict[str, Tensor]]:
    """Return the model of `parts` on the meta device, and separately the weights of `source` in their stored dtypes.

    The weights are views of memory-mapped files; only layers with merged LeRobot adapters take memory.

    Raises:
        DataError: a weight is missing, unknown, or has another shape.
    """
    model, folder = without_storage(empty_model(parts)), locate(source, parts.settings.revision, POLICY)
    with TensorFiles(folder) as files:
        tensors = LeRobotTensors(files, folder) if is_lerobot(folder) else files
        return model, dict(read_weights(model, tensors, model.config.molmo2(), str(folder)))


def fill_model(model: MolmoAct2, folder: Path) -> None:
    """Copy the weights of a checkpoint into a model, in place, including its value head if it has one.

    Raises:
        DataError: a weight is missing, unknown, or has another shape.
    """
    with TensorFiles(folder) as files:
        tensors = LeRobotTensors(files, folder) if is_lerobot(folder) else files
        load_weights(model, tensors, model.config.molmo2(), str(folder))
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.quantize()
    load_value_head(model, folder)


def save_policy(
    folder: Path, parts: PolicyParts, weights: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write a self-contained checkpoint in the released layout, atomically: if it fails, the previous one stays.

    Args:
        weights: Complete state dict of `MolmoAct2`, with adapters merged; it is written in its dtypes.
    """
    with new_checkpoint_folder(folder) as new:
        write_parts(new, parts)
        save_value_head(new, weights)
        write_released(new, weights, parts.config.molmo2(), shard_bytes=shard_bytes)
    return folder


def save_lerobot(folder: Path, parts: PolicyParts, weights: Mapping[str, Tensor], base: str) -> Path:
    """Write a checkpoint in LeRobot's layout.

    Args:
        base: Hub name or folder of a released checkpoint. LeRobot builds the model from it; we do not need it.

    Raises:
        ConfigurationError: the policy has no statistics, or no cameras.
    """
    processor = parts.processor()
    robot = processor.robot.model_copy(  # LeRobot reads masks only from the statistics
        update={
            "action_stats": _masked(processor.robot.action_stats, processor.action),
            "state_stats": _masked(processor.robot.state_stats, processor.state),
        }
    )
    with new_checkpoint_folder(folder) as new:
        (new / BASE).mkdir()
        write_parts(new / BASE, parts)
        write_processors(new, parts.settings, robot, base, parts.config.max_action_dim)
        # LeRobot reads only model.safetensors, so the weights must not be sharded.
        write_released(new, weights, parts.config.molmo2(), prefix="model.", shard_bytes=sys.maxsize)
    return folder


def export_lerobot(source: Path, out: Path, base: str | None = None) -> None:
    """Convert the checkpoint in `source` to LeRobot's layout; see `save_lerobot`."""
    loaded = load_policy(source)
    save_lerobot(out, loaded.parts, loaded.model.state_dict(), base or RELEASED)


def write_parts(folder: Path, parts: PolicyParts) -> None:
    """Write all files of a checkpoint in the released layout to `folder`, except the weights."""
    for name in UNCHANGED_FILES:
        if (parts.files / name).is_file():
            shutil.copyfile(parts.files / name, folder / name)
    (folder / CONFIG).write_text(json.dumps(parts.config.to_dict(), indent=2) + "\n")
    settings, stats = parts.settings, parts.stats
    if parts.robot is not None:
        tag = settings.norm_tag or TRAINED_TAG
        horizon = {"action_horizon": settings.chunk_size, "n_action_steps": settings.n_action_steps}
        previous = stats.metadata_by_tag if stats else {}
        stats = norm_stats({**previous, tag: parts.robot.model_copy(update=horizon)}, settings)
        settings = settings.model_copy(update={"norm_tag": tag})
    if stats is not None:
        stats.save(folder / parts.config.norm_stats_filename)
    if parts.action_tokens is not None:
        parts.action_tokens.save(folder / ACTION_TOKENIZER)
    write_settings(folder, self_contained(settings))


def _masked(stats: FeatureNormStats, normalizer: Normalizer) -> FeatureNormStats:
    return stats.model_copy(update={"mask": tuple(bool(each) for each in normalizer.mask)})
