"""Files of the steps that LeRobot runs before and after a model: normalization with its statistics, and others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import bare_name
from armature.components.robots.policies.norm_stats import ACTION, STATE, FeatureNormStats, RobotMetadata
from armature.components.robots.policies.settings import Normalization, RobotPolicySettings
from armature.components.robots.policies.source import read_json
from armature.components.robots.policies.tensors import TensorFiles

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
NORMALIZATIONS: dict[str, Normalization] = {"QUANTILES": "quantiles", "MEAN_STD": "mean_std", "IDENTITY": "identity"}
IMAGE_SHAPE = (3, 256, 256)  # declared shape of a camera; images of any shape are resized
Step = tuple[str, dict[str, Any]]
RENAMING: Step = ("rename_observations_processor", {"rename_map": {}})
BATCHING: Step = ("to_batch_processor", {})
ON_CPU: Step = ("device_processor", {"device": "cpu", "float_dtype": None})


def normalizations(mapping: Mapping[str, str], where: Path) -> dict[str, Normalization]:
    """Return the settings of the normalization that a config.json maps features to.

    Raises:
        DataError: a normalization is not supported.
    """
    modes: dict[str, Normalization] = {}
    for name, kind in (("state_normalization", "STATE"), ("action_normalization", "ACTION")):
        mode = mapping[kind]
        if mode not in NORMALIZATIONS:
            raise DataError(
                f"{kind} has the unsupported normalization {mode}",
                code="normalization_unsupported",
                where=f"{where}: normalization_mapping",
                remedy=f"use a checkpoint with {', '.join(NORMALIZATIONS)}",
            )
        modes[name] = NORMALIZATIONS[mode]
    return modes


def robot_features(settings: RobotPolicySettings, robot: RobotMetadata, cameras: Sequence[str]) -> dict[str, Any]:
    """Return the fields of config.json that describe the robot."""
    theirs = {ours: name for name, ours in NORMALIZATIONS.items()}
    inputs: dict[str, Any] = {name: {"type": "VISUAL", "shape": list(IMAGE_SHAPE)} for name in cameras}
    return {
        "input_features": inputs | {STATE: {"type": "STATE", "shape": [robot.state_stats.dimensions]}},
        "output_features": {ACTION: {"type": "ACTION", "shape": [robot.action_stats.dimensions]}},
        "normalization_mapping": {
            "VISUAL": "IDENTITY",
            "STATE": theirs[settings.state_normalization],
            "ACTION": theirs[settings.action_normalization],
        },
    }


def read_steps(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configurations of the steps before the model, by name, and their statistics; {} if there are none."""
    file = folder / f"{PREPROCESSOR}.json"
    if not file.is_file():
        return {}, {}
    steps = {step["registry_name"]: step for step in read_json(file)["steps"]}
    configs = {name: step.get("config", {}) for name, step in steps.items()}
    stored = [step["state_file"] for name, step in steps.items() if "normalizer" in name and "state_file" in step]
    if not stored:
        return configs, {}
    with TensorFiles(folder, bare_name(stored[0], str(file))) as saved:
        return configs, {name: saved[name] for name in saved.names}


def read_stats(tensors: Mapping[str, Tensor], key: str, names: Any, where: Path) -> FeatureNormStats:
    """Return the statistics of a feature.

    Raises:
        DataError: there are none.
    """
    stats = {name.removeprefix(f"{key}."): value for name, value in tensors.items() if name.startswith(f"{key}.")}
    if not stats:
        raise DataError(
            f"the checkpoint has no statistics of {key}",
            code="statistics_missing",
            where=str(where),
            remedy="use a complete checkpoint of LeRobot",
        )
    values: dict[str, Any] = {
        name: tuple(value.double().flatten().tolist()) for name, value in stats.items() if name not in ("mask", "count")
    }
    if "count" in stats:
        values["count"] = int(stats["count"].flatten()[0])
    if "mask" in stats:
        values["mask"] = tuple(bool(value) for value in stats["mask"].flatten().tolist())
    return FeatureNormStats(**values, names=tuple(names) if isinstance(names, list) else None)


def normalizer_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the normalizer before a model and of the unnormalizer after it, from its config.json."""
    inputs, outputs = config["input_features"], config["output_features"]
    common = {"eps": 1e-8, "norm_map": config["normalization_mapping"]}
    return common | {"features": inputs | outputs}, common | {"features": outputs}


def write_steps(
    folder: Path, before: Sequence[Step], after: Sequence[Step], robot: RobotMetadata, left_out: frozenset[str]
) -> None:
    """Write the steps before and after the model, with the robot's statistics for the normalizers among them.

    Args:
        left_out: Names of statistics that are not written.
    """
    statistics = {
        f"{key}.{name}": torch.tensor(value, dtype=torch.float32).reshape(-1)
        for key, stats in ((ACTION, robot.action_stats), (STATE, robot.state_stats))
        for name, value in stats.model_dump(exclude_none=True, exclude={"names", *left_out}).items()
    }
    for name, steps in ((PREPROCESSOR, before), (POSTPROCESSOR, after)):
        entries = []
        for number, (registry_name, config) in enumerate(steps):
            entry: dict[str, Any] = {"registry_name": registry_name, "config": config}
            if "normalizer" in registry_name:
                entry["state_file"] = f"{name}_step_{number}_{registry_name}.safetensors"
                save_file(statistics, folder / entry["state_file"])
            entries.append(entry)
        write_document(folder / f"{name}.json", {"name": name, "steps": entries})


def write_document(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object as LeRobot does."""
    file.write_text(json.dumps(content, indent=4) + "\n")
