"""Read and write the files of a checkpoint in LeRobot's layout.

config.json holds LeRobot's settings. Sizes, tokenizer and image processor are not saved: they come from the released
checkpoint that the policy was trained from. Weights have released names with the prefix `model.`, and PEFT adapters are
not merged. The normalizer's statistics are tensors of a processor step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import bare_name
from armature.components.models.source import locate
from armature.components.robots.policies.norm_stats import (
    ACTION,
    STATE,
    FeatureNormStats,
    RobotMetadata,
    resolve,
)
from armature.components.robots.policies.settings import Normalization, RobotPolicySettings
from armature.components.robots.policies.source import POLICY_WITHOUT_WEIGHTS, read_json
from armature.components.robots.policies.tensors import TensorFiles

CONFIG, BASE = "config.json", "base"
PREPROCESSOR, NORMALIZER, PACK = "policy_preprocessor", "molmoact2_masked_normalizer", "molmoact2_pack_inputs"
NORMALIZATIONS: dict[str, Normalization] = {"QUANTILES": "quantiles", "MEAN_STD": "mean_std", "IDENTITY": "identity"}
_ADOPTED = ("normalize_language", "normalize_gripper", "add_setup_tokens", "add_control_tokens")
_PEFT, _BASE_LAYER = "base_model.model.", ".base_layer."
_LORA_A, _LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True)
class LeRobotCheckpoint:
    """Content of a checkpoint in LeRobot's layout.

    base: folder of the released checkpoint that has the tokenizer and the other files LeRobot does not save.
    settings: the given settings of the policy, completed by the settings in the LeRobot checkpoint.
    robot: statistics, prompt words and cameras; None if the checkpoint has no preprocessor.
    """

    base: Path
    settings: RobotPolicySettings
    robot: RobotMetadata | None


def is_lerobot(folder: Path) -> bool:
    """Return True if the folder's config.json was written by LeRobot.

    Raises:
        DataError: there is no config.json, or it is not JSON.
    """
    return "type" in read_json(folder / CONFIG)


def read_lerobot(folder: Path, settings: RobotPolicySettings) -> LeRobotCheckpoint:
    """Read a checkpoint in LeRobot's layout, without its weights.

    Chunk size, executed steps, normalization and the format of prompts come from the checkpoint, because its processor
    was saved with them. Prompt words and cameras come from it only if `settings` leaves them empty.

    Raises:
        ConfigurationError: the base is a hub name without a revision.
        DataError: the policy is not a MolmoAct2, a file is missing or invalid, or a feature is not supported.
    """
    try:
        return _read(folder, settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"a value is missing or has the wrong type: {error!r:.300}",
            code="invalid_lerobot_checkpoint",
            where=f"{folder}: {CONFIG}, {PREPROCESSOR}.json",
            remedy="use the unchanged files that LeRobot saved",
        ) from error


def _read(folder: Path, settings: RobotPolicySettings) -> LeRobotCheckpoint:
    raw = read_json(folder / CONFIG)
    if raw["type"] != "molmoact2":
        raise DataError(
            f"the checkpoint is of the policy {raw['type']!r}",
            code="policy_type_mismatch",
            where=str(folder),
            remedy="use a checkpoint of MolmoAct2",
        )
    if raw.get("joint_signs") is not None:
        raise DataError(
            "the policy changes signs and offsets of joints, which is not supported",
            code="joint_signs_unsupported",
            where=f"{folder / CONFIG}: joint_signs",
            remedy="use a checkpoint that was trained in the robot's own frame",
        )
    mapping = raw["normalization_mapping"]
    modes = {}
    for name, kind in (("state_normalization", "STATE"), ("action_normalization", "ACTION")):
        if mapping[kind] not in NORMALIZATIONS:
            raise DataError(
                f"{kind} has the unsupported normalization {mapping[kind]}",
                code="normalization_unsupported",
                where=f"{folder / CONFIG}: normalization_mapping",
                remedy=f"use a checkpoint with {', '.join(NORMALIZATIONS)}",
            )
        modes[name] = NORMALIZATIONS[mapping[kind]]
    adopted = settings.model_copy(update={name: raw[name] for name in _ADOPTED if name in raw} | modes)
    robot = _robot(folder, raw)
    horizon = {"chunk_size": raw["chunk_size"], "n_action_steps": raw["n_action_steps"]}
    adopted = adopted.model_copy(update=horizon) if robot is None else resolve(adopted, robot)
    return LeRobotCheckpoint(
        _base(folder, raw, settings), RobotPolicySettings.model_validate(adopted.model_dump()), robot
    )


class LeRobotTensors:
    """Weights of a LeRobot checkpoint under released names; adapters are merged when a weight is read.

    Raises:
        DataError: LeRobot does not write such a name, or an adapter is incomplete.
    """

    def __init__(self, files: TensorFiles, folder: Path) -> None:
        self._files = files
        self._alpha = read_json(folder / CONFIG).get("lora_alpha")
        self._stored = {_released(name, folder): name for name in files.names if ".lora_" not in name}
        halves = [
            {name.removesuffix(end) for name in files.names if name.endswith(end)}
            for end in (_LORA_A, _LORA_B, f"{_BASE_LAYER}weight")
        ]
        self._adapted = set.intersection(*halves)
        unknown = {name for name in files.names if ".lora_" in name and not name.endswith((_LORA_A, _LORA_B))}
        incomplete = sorted(set.union(unknown, *halves) - self._adapted)
        if incomplete:
            raise DataError(
                f"an adapter lacks one of lora_A, lora_B and its layer: {incomplete[0]}",
                code="adapter_incomplete",
                where=str(folder),
            )
        if self._adapted and self._alpha is None:
            raise DataError(
                "the checkpoint has adapters but no lora_alpha", code="lora_alpha_missing", where=str(folder / CONFIG)
            )

    @property
    def names(self) -> set[str]:
        """Released names of all weights."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape without reading the weight."""
        return self._files.shape(self._stored[name])

    def __getitem__(self, name: str) -> Tensor:
        """Read a weight W. If it has an adapter of matrices A and B, return W + (alpha / rank) B A in float32."""
        stored = self._stored[name]
        weight = self._files[stored]
        layer = stored.removesuffix(f"{_BASE_LAYER}weight")
        if layer not in self._adapted:
            return weight
        down, up = self._files[layer + _LORA_A].float(), self._files[layer + _LORA_B].float()
        return weight.float() + (up @ down) * (float(self._alpha or 0) / down.shape[0])


def _base(folder: Path, raw: Mapping[str, Any], settings: RobotPolicySettings) -> Path:
    """Return the folder of the released checkpoint that the LeRobot checkpoint in `folder` was trained from.

    It is `base/` if we wrote the checkpoint, else the checkpoint named in the settings, else the one in config.json.
    """
    if (folder / BASE).is_dir():
        return folder / BASE
    if settings.checkpoint_path is not None:
        return locate(settings.checkpoint_path, settings.checkpoint_revision, POLICY_WITHOUT_WEIGHTS)
    revision = settings.checkpoint_revision or raw.get("checkpoint_revision")
    return locate(str(raw["checkpoint_path"]), revision, POLICY_WITHOUT_WEIGHTS)


def _robot(folder: Path, raw: Mapping[str, Any]) -> RobotMetadata | None:
    """Return statistics, prompt words and cameras of the saved preprocessor; None if there is no preprocessor."""
    file = folder / f"{PREPROCESSOR}.json"
    if not file.is_file():
        return None
    steps = {step["registry_name"]: step for step in read_json(file)["steps"]}
    normalizer = steps.get(NORMALIZER) or steps.get("normalizer_processor")
    if normalizer is None or "state_file" not in normalizer:
        return None
    with TensorFiles(folder, bare_name(normalizer["state_file"], str(file))) as saved:
        tensors = {name: saved[name] for name in saved.names}
    names = raw.get("dataset_feature_names") or {}
    packed = steps[PACK]["config"] if PACK in steps else {}
    return RobotMetadata(
        action_key=ACTION,
        state_key=STATE,
        camera_keys=tuple(packed.get("image_keys") or raw.get("image_keys") or ()),
        normalize_gripper=bool(raw["normalize_gripper"]),
        action_horizon=raw["chunk_size"],
        n_action_steps=raw["n_action_steps"],
        setup_type=packed.get("setup_type") or raw.get("setup_type") or "",
        control_mode=packed.get("control_mode") or raw.get("control_mode") or "",
        action_stats=_stats(tensors, ACTION, names.get(ACTION), file),
        state_stats=_stats(tensors, STATE, names.get(STATE), file),
    )


def _stats(tensors: Mapping[str, Tensor], key: str, names: Any, where: Path) -> FeatureNormStats:
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


def _released(name: str, folder: Path) -> str:
    """Return the released name of a weight that LeRobot's weights file calls `name`."""
    if not name.startswith("model."):
        raise DataError(
            f"the weight {name} does not have LeRobot's prefix model.",
            code="unknown_weight_name",
            where=str(folder),
            remedy="use an unchanged checkpoint",
        )
    return name.removeprefix("model.").removeprefix(_PEFT).replace(_BASE_LAYER, ".")


# --- Writing LeRobot's files ---
#
# The files that LeRobot reads from a released checkpoint are in `base/`. LeRobot itself builds the model from
# `checkpoint_path` before it reads our weights: it must name a released checkpoint, or a folder from `save_policy`.

POSTPROCESSOR, UNNORMALIZER = "policy_postprocessor", "molmoact2_masked_unnormalizer"
IMAGE_SHAPE = (3, 256, 256)  # declared shape of a camera; LeRobot resizes images of any shape
_MODES = {ours: theirs for theirs, ours in NORMALIZATIONS.items()}
Step = tuple[str, dict[str, Any]]


def write_processors(
    folder: Path, settings: RobotPolicySettings, robot: RobotMetadata, base: str, max_action_dim: int
) -> None:
    """Write config.json, the pre- and postprocessor, and their statistics.

    Args:
        base: Hub name or folder of the released checkpoint that LeRobot builds the model from.

    Raises:
        ConfigurationError: the settings name no cameras.
    """
    if not settings.image_keys:
        raise ConfigurationError(
            "the settings name no cameras",
            code="cameras_missing",
            where="policy.image_keys",
            remedy="set it to the cameras in the policy's order",
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
    """Return the settings that LeRobot expects twice: in config.json and in the preprocessor's packing step."""
    names = ("setup_type", "control_mode", "normalize_language", "add_setup_tokens", "add_control_tokens")
    more = ("max_sequence_length", "chunk_size", "action_mode")
    fields = {name: getattr(settings, name) for name in (*names, *more)}
    return fields | {"image_keys": list(settings.image_keys), "checkpoint_path": base}


def _policy_fields(settings: RobotPolicySettings) -> dict[str, Any]:
    """Return the settings that LeRobot expects only in config.json.

    Names of some of these fields differ between LeRobot's versions.
    """
    names = ("n_action_steps", "normalize_gripper", "num_flow_timesteps", "num_inference_steps")
    more = ("mask_action_dim_padding", "enable_knowledge_insulation")
    fields = {name: getattr(settings, name) for name in (*names, *more)}
    fields["inference_action_mode"] = "discrete" if settings.action_mode == "discrete" else "continuous"
    if settings.semantics != "head":
        return fields | {"model_dtype": settings.dtype}
    dropout = settings.llm_residual_dropout
    return fields | {"train_mode_vlm": "fft", "dtype": settings.dtype, "llm_residual_dropout": dropout}


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
