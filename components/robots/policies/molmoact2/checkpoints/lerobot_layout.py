"""Read and write the files of a checkpoint in LeRobot's layout.

config.json holds LeRobot's settings. Sizes, tokenizer and image processor are not saved: they come from the released
checkpoint that the policy was trained from. Weights have released names with the prefix `model.`, and PEFT adapters are
not merged. The normalizer's statistics are tensors of a processor step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from armature.components.contracts.errors import DataError
from armature.components.models.source import locate
from armature.components.robots.policies.inputs import require_cameras
from armature.components.robots.policies.lerobot.processors import (
    BATCHING,
    ON_CPU,
    PREPROCESSOR,
    RENAMING,
    Step,
    normalizations,
    normalizer_settings,
    read_stats,
    read_steps,
    robot_features,
    write_document,
    write_steps,
)
from armature.components.robots.policies.norm_stats import (
    ACTION,
    STATE,
    RobotMetadata,
    resolve,
)
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.source import CONFIG, POLICY_WITHOUT_WEIGHTS, read_json
from armature.components.robots.policies.tensors import TensorFiles

BASE = "base"
NORMALIZER, PACK = "molmoact2_masked_normalizer", "molmoact2_pack_inputs"
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
    modes = normalizations(raw["normalization_mapping"], folder / CONFIG)
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
    steps, tensors = read_steps(folder)
    if not tensors:
        return None
    file = folder / f"{PREPROCESSOR}.json"
    names = raw.get("dataset_feature_names") or {}
    packed = steps.get(PACK, {})
    return RobotMetadata(
        action_key=ACTION,
        state_key=STATE,
        camera_keys=tuple(packed.get("image_keys") or raw.get("image_keys") or ()),
        normalize_gripper=bool(raw["normalize_gripper"]),
        action_horizon=raw["chunk_size"],
        n_action_steps=raw["n_action_steps"],
        setup_type=packed.get("setup_type") or raw.get("setup_type") or "",
        control_mode=packed.get("control_mode") or raw.get("control_mode") or "",
        action_stats=read_stats(tensors, ACTION, names.get(ACTION), file),
        state_stats=read_stats(tensors, STATE, names.get(STATE), file),
    )


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

UNNORMALIZER = "molmoact2_masked_unnormalizer"


def write_processors(
    folder: Path, settings: RobotPolicySettings, robot: RobotMetadata, base: str, max_action_dim: int
) -> None:
    """Write config.json, the pre- and postprocessor, and their statistics.

    Args:
        base: Hub name or folder of the released checkpoint that LeRobot builds the model from.

    Raises:
        ConfigurationError: the settings name no cameras.
    """
    require_cameras(settings.image_keys)
    features = robot_features(settings, robot, settings.image_keys)
    prompt = _prompt(settings, base)
    config = {
        "type": "molmoact2",
        "n_obs_steps": 1,
        "input_features": features["input_features"],
        "output_features": features["output_features"],
        "device": "cpu",
        "normalization_mapping": features["normalization_mapping"],
        **prompt,
        **_policy_fields(settings),
    }
    if robot.action_stats.names and robot.state_stats.names:
        names = {ACTION: list(robot.action_stats.names), STATE: list(robot.state_stats.names)}
        config["dataset_feature_names"] = names
    write_document(folder / CONFIG, config)
    by_key = {ACTION: robot.action_stats, STATE: robot.state_stats}
    masks = {key: list(stats.mask) for key, stats in by_key.items() if stats.mask}
    normalizer, unnormalizer = normalizer_settings(features)
    env = {"max_action_dim": max_action_dim, "env_action_dim": robot.action_stats.dimensions}
    frame = {"joint_signs": None, "joint_offsets": None}
    moved = settings.semantics != "seed"
    before: list[Step] = [
        RENAMING,
        BATCHING,
        *([("molmoact2_state_frame_transform", frame)] if moved else []),
        (NORMALIZER, normalizer),
        ("molmoact2_clamp_normalized", {"normalization_masks": masks}),
        (PACK, prompt | env),
        ON_CPU,
    ]
    after: list[Step] = [
        ("molmoact2_clamp_action", {}),
        (UNNORMALIZER, unnormalizer),
        *([("molmoact2_action_frame_transform", frame)] if moved else []),
        ON_CPU,
    ]
    write_steps(folder, before, after, robot, frozenset())


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
