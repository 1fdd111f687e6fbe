"""A policy's checkpoint: read whole and strictly, from the released layout or LeRobot's, and written self-contained.

Beside the released files, what we write has `policy.json` (its settings) and `action_tokenizer/`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from armature.components.artifacts.tensors import checkpoint_folder
from armature.components.models.blockwise import FP8Linear
from armature.components.models.load import without_storage
from armature.components.models.source import locate
from armature.components.robots.policies.molmoact2.checkpoints.lerobot_layout import (
    BASE,
    LeRobotTensors,
    is_lerobot,
    write_processors,
)
from armature.components.robots.policies.molmoact2.checkpoints.parts import (
    ACTION_TOKENIZER,
    CONFIG,
    PolicyParts,
    load_parts,
)
from armature.components.robots.policies.molmoact2.checkpoints.weights import (
    SHARD_BYTES,
    VALUE_HEAD,
    TensorFiles,
    load_value_head,
    load_weights,
    read_weights,
    write_released,
)
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.processing.norm_stats import (
    FeatureNormStats,
    Normalizer,
    RobotMetadata,
    norm_stats,
)
from armature.components.robots.policies.molmoact2.processing.processor import Processor
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.source import POLICY, write_settings

VALUE_HEAD_FILE = "value_head.safetensors"
OWN_TAG = "trained"
"""The tag of statistics that came with a dataset, where the settings name none."""
SOURCES = (
    *("checkpoint_path", "path", "tiny", "revision", "checkpoint_revision"),
    *("action_tokenizer", "action_tokenizer_revision"),
)
"""Settings that say where parts of the policy come from: what was written needs them no more."""
UNCHANGED_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)


@dataclass(frozen=True)
class LoadedPolicy:
    """A checkpoint with its model, in evaluation mode."""

    model: MolmoAct2
    parts: PolicyParts

    @property
    def config(self) -> MolmoAct2Config:
        return self.parts.config

    @property
    def settings(self) -> RobotPolicySettings:
        return self.parts.settings

    def processor(self) -> Processor:
        return self.parts.processor()


def load_policy(
    source: str | Path,
    settings: RobotPolicySettings | None = None,
    robot: RobotMetadata | None = None,
    device: str | torch.device = "cpu",
) -> LoadedPolicy:
    """The policy with its weights on `device`, in the dtypes that `settings.dtype` stands for.

    Raises:
        ConfigurationError, DataError: as `load_parts`, or a weight is missing, unknown or of another shape.
    """
    parts = load_parts(source, settings, robot)
    return LoadedPolicy(load_model(source, parts, device), parts)


def empty_model(parts: PolicyParts) -> MolmoAct2:
    """The model of `parts` on the meta device, where it takes no memory."""
    with torch.device("meta"):
        return MolmoAct2(parts.config, parts.settings.dtype, parts.settings.llm_residual_dropout).eval()


def load_model(source: str | Path, parts: PolicyParts, device: str | torch.device = "cpu") -> MolmoAct2:
    """The model of `parts`, filled with the weights of `source`, one tensor in memory besides it at a time.

    Raises:
        DataError: a weight is missing, unknown or of another shape.
    """
    model = empty_model(parts).to_empty(device=device)
    fill_model(model, locate(source, parts.settings.revision, POLICY))
    return model.eval()


def read_model(source: str | Path, parts: PolicyParts) -> tuple[MolmoAct2, dict[str, Tensor]]:
    """Return the model that `load_model` loads, but without storage, and its weights as stored in the files.

    The weights are views of mapped files; only layers into which adapters of LeRobot are merged take memory.

    Raises:
        DataError: a weight is missing, unknown or of another shape.
    """
    model, folder = without_storage(empty_model(parts)), locate(source, parts.settings.revision, POLICY)
    with TensorFiles(folder) as files:
        tensors = LeRobotTensors(files, folder) if is_lerobot(folder) else files
        return model, dict(read_weights(model, tensors, model.config.molmo2(), str(folder)))


def fill_model(model: MolmoAct2, folder: Path) -> None:
    """Give a model, and its value head if it has one, the weights of a checkpoint; its tensors stay where they are.

    Raises:
        DataError: a weight is missing, unknown or of another shape.
    """
    with TensorFiles(folder) as files:
        tensors = LeRobotTensors(files, folder) if is_lerobot(folder) else files
        load_weights(model, tensors, model.config.molmo2(), str(folder))
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.quantize()
    if model.value_head is not None:
        with TensorFiles(folder, VALUE_HEAD_FILE) as files:
            load_value_head(model.value_head, files, str(folder / VALUE_HEAD_FILE))


def save_policy(
    folder: Path, parts: PolicyParts, weights: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write a checkpoint in the released layout that needs nothing else; one that fails leaves the earlier one.

    Args:
        weights: State of `MolmoAct2`, whole, with adapters merged; written in its dtypes. A value head has a file of
            its own, which nobody needs who only acts.
    """
    head = {name: tensor.cpu() for name, tensor in weights.items() if name.startswith(VALUE_HEAD)}
    with checkpoint_folder(folder) as new:
        write_parts(new, parts)
        if head:
            save_file(head, new / VALUE_HEAD_FILE)
        write_released(new, weights, parts.config.molmo2(), shard_bytes=shard_bytes)
    return folder


def save_lerobot(folder: Path, parts: PolicyParts, weights: Mapping[str, Tensor], base: str) -> Path:
    """Write a checkpoint in LeRobot's layout; `base` is what LeRobot needs besides it (`lerobot_export`), we do not.

    Raises:
        ConfigurationError: the policy knows no statistics, or no cameras.
    """
    processor = parts.processor()
    robot = processor.robot.model_copy(  # LeRobot takes masks from the statistics alone
        update={
            "action_stats": _masked(processor.robot.action_stats, processor.action),
            "state_stats": _masked(processor.robot.state_stats, processor.state),
        }
    )
    with checkpoint_folder(folder) as new:
        (new / BASE).mkdir()
        write_parts(new / BASE, parts)
        write_processors(new, parts.settings, robot, base, parts.config.max_action_dim)
        # LeRobot reads one file only
        write_released(new, weights, parts.config.molmo2(), prefix="model.", shard_bytes=sys.maxsize)
    return folder


def export_lerobot(source: Path, out: Path, base: str) -> None:
    """Write the policy of a checkpoint as `save_lerobot` does."""
    loaded = load_policy(source)
    save_lerobot(out, loaded.parts, loaded.model.state_dict(), base)


def write_parts(folder: Path, parts: PolicyParts) -> None:
    """Write everything but the weights."""
    for name in UNCHANGED_FILES:
        if (parts.files / name).is_file():
            shutil.copyfile(parts.files / name, folder / name)
    (folder / CONFIG).write_text(json.dumps(parts.config.to_dict(), indent=2) + "\n")
    settings, stats = parts.settings, parts.stats
    if parts.robot is not None:
        tag = settings.norm_tag or OWN_TAG
        horizon = {"action_horizon": settings.chunk_size, "n_action_steps": settings.n_action_steps}
        known = stats.metadata_by_tag if stats else {}
        stats = norm_stats({**known, tag: parts.robot.model_copy(update=horizon)}, settings)
        settings = settings.model_copy(update={"norm_tag": tag})
    if stats is not None:
        stats.save(folder / parts.config.norm_stats_filename)
    if parts.action_tokens is not None:
        parts.action_tokens.save(folder / ACTION_TOKENIZER)
    write_settings(folder, settings.model_copy(update=dict.fromkeys(SOURCES)))


def _masked(stats: FeatureNormStats, normalizer: Normalizer) -> FeatureNormStats:
    return stats.model_copy(update={"mask": tuple(bool(each) for each in normalizer.mask)})
