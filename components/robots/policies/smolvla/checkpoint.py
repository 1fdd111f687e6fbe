"""Read and write checkpoints of SmolVLA in LeRobot's format, and make one with random weights.

LeRobot saves config.json, model.safetensors and the steps before and after the model, and takes configuration and
tokenizer of the VLM from `vlm_model_name`. A checkpoint that we write also has them, in `vlm/`, and the
settings in `policy.json`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, SmolVLMConfig

from armature.components.artifacts.tensors import new_checkpoint_folder
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import foreign
from armature.components.models.source import locate
from armature.components.models.tiny.tokenizer import BYTES, train_bpe
from armature.components.robots.policies.family import load_model
from armature.components.robots.policies.inputs import require_robot
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
from armature.components.robots.policies.norm_stats import ACTION, STATE, RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.configuration import SmolVLAConfig
from armature.components.robots.policies.smolvla.model import SmolVLA
from armature.components.robots.policies.smolvla.processor import SmolVLAProcessor
from armature.components.robots.policies.source import (
    CONFIG,
    POLICY_WITHOUT_WEIGHTS,
    first_settings,
    read_json,
    read_settings,
    self_contained,
    write_settings,
)
from armature.components.robots.policies.tensors import (
    SINGLE,
    VALUE_HEAD,
    copy_weights,
    load_value_head,
    save_value_head,
)

VLM = "vlm"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>")
PATCH, SHUFFLE, MERGES = 14, 2, 1000
PROCESSOR = {
    "processor_class": "SmolVLMProcessor",
    "image_processor": {"image_processor_type": "SmolVLMImageProcessor"},
    "video_processor": {"video_processor_type": "SmolVLMVideoProcessor"},
}
"""Content of a tiny VLM's processor_config.json, which LeRobot loads but only takes the tokenizer from."""


@dataclass(frozen=True)
class SmolVLAParts:
    """Everything in a checkpoint except its weights.

    robot: statistics to normalize by; None if neither the checkpoint nor a dataset provides them.
    files: folder with the VLM's configuration and tokenizer. folder: the checkpoint.
    """

    config: SmolVLAConfig
    vlm: SmolVLMConfig
    settings: RobotPolicySettings
    robot: RobotMetadata | None
    files: Path
    folder: Path

    def processor(self, horizon: int | None = None) -> SmolVLAProcessor:
        """Return the processor; `horizon` is always the policy's own, because there is one robot.

        Raises:
            ConfigurationError: `robot` is None.
            DataError: the tokenizer cannot be read.
        """
        robot = require_robot(self.robot, self.folder)
        with foreign("the tokenizer cannot be read", where=str(self.files), remedy="use the VLM's own files"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(self.files, local_files_only=True)
        if (last := max(tokenizer.get_vocab().values())) >= (size := self.vlm.text_config.vocab_size):
            raise DataError(
                f"the tokenizer has the token id {last}, the VLM has {size} tokens",
                code="tokenizer_mismatch",
                where=str(self.files),
                remedy="use the VLM's own tokenizer",
            )
        return SmolVLAProcessor(self.config, tokenizer, self.settings, robot)


def load_parts(
    source: str | Path, settings: RobotPolicySettings | None = None, robot: RobotMetadata | None = None
) -> SmolVLAParts:
    """Read everything but the weights.

    Args:
        source: A checkpoint's folder, an artifact, or a hub name.
        settings: The policy's settings; None: those saved with the checkpoint. Without `robot`, chunk size, executed
            steps, cameras and normalization come from the checkpoint.
        robot: Statistics and cameras of the dataset to train on, which replace the checkpoint's.

    Raises:
        ConfigurationError: there are no settings, or a hub name has no revision.
        DataError: a file is missing or invalid, or the model is a variant that is not supported.
    """
    folder = locate(source, settings.revision if settings else None, POLICY_WITHOUT_WEIGHTS)
    chosen = first_settings(source, settings, read_settings(Path(source)), read_settings(folder))
    config, files = SmolVLAConfig.load(folder), folder / VLM
    name = chosen.checkpoint_path or config.vlm_model_name
    if not files.is_dir() and name != VLM:  # as a name it would be any folder `vlm` of the working directory
        files = locate(name, chosen.checkpoint_revision, POLICY_WITHOUT_WEIGHTS)
    vlm = _read_vlm(files / CONFIG, config)
    if robot is None:
        robot, chosen = _saved_robot(folder, config), _adopted(chosen, config, folder)
    else:
        fields = robot_features(chosen, robot, chosen.image_keys or robot.camera_keys)
        fields |= {"chunk_size": chosen.chunk_size, "n_action_steps": chosen.n_action_steps}
        config = SmolVLAConfig.model_validate(config.model_dump() | fields)
    return SmolVLAParts(config, vlm, chosen, robot, files, folder)


def _read_vlm(file: Path, config: SmolVLAConfig) -> SmolVLMConfig:
    """Return the configuration of the VLM.

    Raises:
        DataError: it is of another model, or its patches are larger than the images.
    """
    document, side = read_json(file), min(config.resize_imgs_with_padding)
    with foreign("the VLM's configuration cannot be read", where=str(file), remedy="use the VLM's own files"):
        vlm = SmolVLMConfig.from_dict(document)
    kind, patch = document.get("model_type"), vlm.vision_config.patch_size
    if kind != SmolVLMConfig.model_type or side < patch:
        raise DataError(
            f"the VLM is of the type {kind!r} with patches of {patch} pixels, and images have {side}",
            code="vlm_unsupported",
            where=str(file),
            remedy="set policy.checkpoint_path to the SmolVLM that the policy was trained from",
        )
    return vlm


def _adopted(settings: RobotPolicySettings, config: SmolVLAConfig, folder: Path) -> RobotPolicySettings:
    """Return `settings` with the horizon and the normalization that the checkpoint was trained with."""
    mapping = {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"} | config.normalization_mapping
    horizon = {"chunk_size": config.chunk_size, "n_action_steps": config.n_action_steps}
    return settings.model_copy(update=horizon | normalizations(mapping, folder / CONFIG))


def _saved_robot(folder: Path, config: SmolVLAConfig) -> RobotMetadata | None:
    """Return the statistics and cameras of the steps before the model; None if they have no statistics.

    Cameras have the names that the dataset gives them, before LeRobot renames them.
    """
    file = folder / f"{PREPROCESSOR}.json"
    with foreign("the steps before the model cannot be read", where=str(file), remedy="use a complete checkpoint"):
        steps, tensors = read_steps(folder)
        if not tensors:
            return None
        renamed = {new: old for old, new in steps.get(RENAMING[0], {}).get("rename_map", {}).items()}
        cameras = tuple(renamed.get(name, name) for name in config.cameras)
        action, state = (read_stats(tensors, key, None, file) for key in (ACTION, STATE))
        return RobotMetadata(camera_keys=cameras, action_stats=action, state_stats=state)


# --- Weights ---


def empty_model(parts: SmolVLAParts) -> SmolVLA:
    """Return the model of `parts` on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return SmolVLA(parts.config, parts.vlm, parts.settings.dtype).eval()


def fill_model(model: SmolVLA, folder: Path) -> None:
    """Copy the weights of a checkpoint into a model, in place, including its value head if it has one.

    Raises:
        DataError: a weight is missing, unknown, or has another shape.
    """
    copy_weights(folder, lerobot_weights(model.state_dict()))
    load_value_head(model, folder)


def lerobot_name(name: str) -> str:
    """Return the name in LeRobot's checkpoints of a weight of `SmolVLA`.

    Example:
        >>> lerobot_name("action_expert.lm_expert.norm.weight"), lerobot_name("action_expert.state_proj.bias")
        ('model.vlm_with_expert.lm_expert.norm.weight', 'model.state_proj.bias')
    """
    inner = name.removeprefix("action_expert.")
    return f"model.vlm_with_expert.{inner}" if inner.startswith(("vlm.", "lm_expert.")) else f"model.{inner}"


def lerobot_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of `SmolVLA`, without a value head, under their names in LeRobot's checkpoints."""
    return {lerobot_name(name): value for name, value in weights.items() if not name.startswith(VALUE_HEAD)}


def save_policy(folder: Path, parts: SmolVLAParts, weights: Mapping[str, Tensor]) -> Path:
    """Write a self-contained checkpoint, atomically: if it fails, the previous one stays.

    Args:
        weights: Complete state dict of `SmolVLA`, with adapters merged; it is written in its dtypes.
    """
    with new_checkpoint_folder(folder) as new:
        save_file({name: value.cpu().contiguous() for name, value in lerobot_weights(weights).items()}, new / SINGLE)
        save_value_head(new, weights)
        write_document(new / CONFIG, parts.config.model_dump(mode="json"))
        shutil.copytree(parts.files, new / VLM, ignore=shutil.ignore_patterns("*.safetensors"))
        if parts.robot is not None:
            _write_steps(new, parts.config, parts.robot)
        write_settings(new, self_contained(parts.settings))
    return folder


def export_lerobot(source: Path, out: Path, base: str | None = None) -> None:
    """Write the checkpoint in `source` to the folder `out` with the VLM that LeRobot takes its tokenizer from."""
    parts = load_parts(source)
    config = parts.config.model_copy(update={"vlm_model_name": base or parts.config.vlm_model_name})
    save_policy(out, replace(parts, config=config), load_model(source, parts).state_dict())


def _write_steps(folder: Path, config: SmolVLAConfig, robot: RobotMetadata) -> None:
    """Write the steps that LeRobot runs before and after the model, with the statistics."""
    normalizer, unnormalizer = normalizer_settings(config.model_dump(mode="json"))
    text = {"max_length": config.tokenizer_max_length, "task_key": "task", "padding_side": "right", "truncation": True}
    before: list[Step] = [
        RENAMING,
        BATCHING,
        ("smolvla_new_line_processor", {}),
        ("tokenizer_processor", text | {"padding": "longest", "tokenizer_name": config.vlm_model_name}),
        ON_CPU,
        ("normalizer_processor", normalizer),
    ]
    after: list[Step] = [("unnormalizer_processor", unnormalizer), ON_CPU]
    write_steps(folder, before, after, robot, frozenset({"mask", "count"}))


# --- A tiny policy ---


def make_tiny_policy(folder: Path, settings: RobotPolicySettings) -> Path:
    """Write a checkpoint with random weights of the sizes `settings.tiny` to `folder`.

    It has no statistics of a robot until it is trained. LeRobot finds its VLM if it runs in the checkpoint's folder.
    """
    assert settings.tiny is not None
    sizes = settings.tiny
    config = SmolVLAConfig(
        type="smolvla",
        chunk_size=settings.chunk_size,
        n_action_steps=settings.n_action_steps,
        max_state_dim=sizes.max_action_dim,
        max_action_dim=sizes.max_action_dim,
        resize_imgs_with_padding=(sizes.image_side, sizes.image_side),
        num_vlm_layers=sizes.layers,
        expert_width_multiplier=sizes.expert_hidden_size / sizes.hidden_size,
        vlm_model_name=VLM,
    )
    with tempfile.TemporaryDirectory() as scratch, torch.random.fork_rng(devices=[]):
        files = Path(scratch)
        tokenizer = _tokenizer(sizes.corpus)
        vlm = SmolVLMConfig(
            vision_config=sizes.vision_config
            | {
                "image_size": sizes.image_side,
                "patch_size": PATCH,
                "initializer_range": sizes.vision_initializer_range,
            },
            text_config={
                "model_type": "llama",
                **sizes.text_config,
                "vocab_size": len(tokenizer),
                "pad_token_id": tokenizer.pad_token_id,
                "initializer_range": sizes.initializer_range,
            },
            scale_factor=SHUFFLE,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pad_token_id=tokenizer.pad_token_id,
        )
        vlm.save_pretrained(files)
        tokenizer.save_pretrained(files)
        write_document(files / "processor_config.json", PROCESSOR)
        torch.manual_seed(sizes.seed)
        return save_policy(
            folder, SmolVLAParts(config, vlm, settings, None, files, folder), SmolVLA(config, vlm).state_dict()
        )


def _tokenizer(corpus: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the corpus, with the special tokens that LeRobot asks a VLM for."""
    model = train_bpe(len(SPECIAL) + BYTES + MERGES, SPECIAL, corpus)
    named = dict(zip(("image_token", "fake_image_token", "global_image_token"), SPECIAL[2:], strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token=SPECIAL[1], eos_token=SPECIAL[1], extra_special_tokens=named
    )
