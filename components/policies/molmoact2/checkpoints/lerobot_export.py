"""A policy written as LeRobot saves it, with what LeRobot takes from a released checkpoint in `base/`.

LeRobot itself builds the model from `checkpoint_path` before it reads our weights: name a released checkpoint there,
or a folder that `save_policy` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError
from armature.components.policies.molmoact2.checkpoints.lerobot_layout import (
    CONFIG,
    NORMALIZATIONS,
    NORMALIZER,
    PACK,
    PREPROCESSOR,
)
from armature.components.policies.molmoact2.processing.norm_stats import ACTION, STATE, FeatureNormStats, RobotMetadata
from armature.components.policies.settings import RobotPolicySettings

POSTPROCESSOR, UNNORMALIZER = "policy_postprocessor", "molmoact2_masked_unnormalizer"
IMAGE_SHAPE = (3, 256, 256)  # declared shape of a camera; LeRobot resizes whatever comes
_MODES = {ours: theirs for theirs, ours in NORMALIZATIONS.items()}
Step = tuple[str, dict[str, Any]]


def write_processors(
    folder: Path, settings: RobotPolicySettings, robot: RobotMetadata, base: str, max_action_dim: int
) -> None:
    """Write config.json, the two processors and their statistics.

    Args:
        base: Hub name or folder of the released checkpoint that LeRobot builds the model from.

    Raises:
        ConfigurationError: no cameras are named.
    """
    if not settings.image_keys:
        raise ConfigurationError(
            "no cameras are named", code="cameras_missing", where="policy.image_keys", remedy="name them in order"
        )
    inputs: dict[str, Any] = {key: {"type": "VISUAL", "shape": list(IMAGE_SHAPE)} for key in settings.image_keys}
    inputs[STATE] = {"type": "STATE", "shape": [robot.state_stats.dimensions]}
    outputs = {ACTION: {"type": "ACTION", "shape": [robot.action_stats.dimensions]}}
    norm_map = {
        "VISUAL": "IDENTITY",
        "STATE": _MODES[settings.state_normalization],
        "ACTION": _MODES[settings.action_normalization],
    }
    prompt = _prompt(settings, base)
    config = {
        "type": "molmoact2",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "device": "cpu",
        "normalization_mapping": norm_map,
        **prompt,
        **_policy_fields(settings),
        **_version_fields(settings),
    }
    if robot.action_stats.names and robot.state_stats.names:
        names = {ACTION: list(robot.action_stats.names), STATE: list(robot.state_stats.names)}
        config["dataset_feature_names"] = names
    _write(folder / CONFIG, config)
    by_key = {ACTION: robot.action_stats, STATE: robot.state_stats}
    statistics = {f"{key}.{name}": value for key, stats in by_key.items() for name, value in _tensors(stats).items()}
    masks = {key: list(stats.mask) for key, stats in by_key.items() if stats.mask}
    normal: dict[str, Any] = {"eps": 1e-8, "norm_map": norm_map}
    env = {"max_action_dim": max_action_dim, "env_action_dim": robot.action_stats.dimensions}
    frame = {"joint_signs": None, "joint_offsets": None}
    moved, cpu = settings.semantics != "seed", ("device_processor", {"device": "cpu", "float_dtype": None})
    before: list[Step] = [
        ("rename_observations_processor", {"rename_map": {}}),
        ("to_batch_processor", {}),
        *([("molmoact2_state_frame_transform", frame)] if moved else []),
        (NORMALIZER, normal | {"features": inputs | outputs}),
        ("molmoact2_clamp_normalized", {"normalization_masks": masks}),
        (PACK, prompt | env),
        cpu,
    ]
    after: list[Step] = [
        ("molmoact2_clamp_action", {}),
        (UNNORMALIZER, normal | {"features": outputs}),
        *([("molmoact2_action_frame_transform", frame)] if moved else []),
        cpu,
    ]
    _write_steps(folder, PREPROCESSOR, before, statistics)
    _write_steps(folder, POSTPROCESSOR, after, statistics)


def _prompt(settings: RobotPolicySettings, base: str) -> dict[str, Any]:
    """What both config.json and the packing step say."""
    names = ("setup_type", "control_mode", "normalize_language", "add_setup_tokens", "add_control_tokens")
    more = ("max_sequence_length", "chunk_size", "action_mode")
    fields = {name: getattr(settings, name) for name in (*names, *more)}
    return fields | {"image_keys": list(settings.image_keys), "checkpoint_path": base}


def _policy_fields(settings: RobotPolicySettings) -> dict[str, Any]:
    names = ("n_action_steps", "normalize_gripper", "num_flow_timesteps", "num_inference_steps")
    more = ("mask_action_dim_padding", "enable_knowledge_insulation")
    inference = "discrete" if settings.action_mode == "discrete" else "continuous"
    return {name: getattr(settings, name) for name in (*names, *more)} | {"inference_action_mode": inference}


def _version_fields(settings: RobotPolicySettings) -> dict[str, Any]:
    """The fields that only some versions know; without adapters all three build the layers that we write."""
    if settings.semantics == "head":
        return {
            "train_mode_vlm": "fft",
            "dtype": settings.dtype,
            "llm_residual_dropout": settings.llm_residual_dropout,
        }
    return {"model_dtype": settings.dtype}


def _tensors(stats: FeatureNormStats) -> dict[str, Tensor]:
    values = stats.model_dump(exclude_none=True, exclude={"names"})
    return {name: torch.tensor(value, dtype=torch.float32).reshape(-1) for name, value in values.items()}


def _write_steps(folder: Path, name: str, steps: list[Step], statistics: dict[str, Tensor]) -> None:
    entries = []
    for number, (registry_name, config) in enumerate(steps):
        entry: dict[str, Any] = {"registry_name": registry_name, "config": config}
        if registry_name in (NORMALIZER, UNNORMALIZER):
            entry["state_file"] = f"{name}_step_{number}_{registry_name}.safetensors"
            save_file(statistics, folder / entry["state_file"])
        entries.append(entry)
    _write(folder / f"{name}.json", {"name": name, "steps": entries})


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=4) + "\n")
