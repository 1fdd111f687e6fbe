"""SmolVLA as a `PolicyFamily`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import SmolVLMConfig

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.policies.model import ModelShape
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.checkpoint import (
    SmolVLAParts,
    export_lerobot,
    load_model,
    load_parts,
    make_tiny_policy,
    save_policy,
)
from armature.components.robots.policies.smolvla.configuration import SmolVLAConfig
from armature.components.robots.policies.smolvla.model import SmolVLA
from armature.components.robots.policies.smolvla.policy import SmolVLAPlan, SmolVLAPolicy, open_policy
from armature.components.robots.policies.source import config_folder

__all__ = ["export_lerobot", "load_model", "load_parts", "make_tiny_policy", "open_policy", "save_policy"]

player, sampling_plan = SmolVLAPolicy, SmolVLAPlan.of


def read_config(settings: RobotPolicySettings) -> tuple[SmolVLAConfig, SmolVLMConfig]:
    """Return the configurations of the policy and of its VLM: of a tiny policy, or of a folder or a hub name."""
    with TemporaryDirectory() as scratch:
        if settings.tiny is not None:
            folder = make_tiny_policy(Path(scratch) / "tiny", settings)
        else:
            folder = config_folder(settings.path or settings.checkpoint_path, settings.revision)
        parts = load_parts(folder, settings)
    return parts.config, parts.vlm


def shape(configs: tuple[SmolVLAConfig, SmolVLMConfig]) -> ModelShape:
    """Return the sizes of the network."""
    config, vlm = configs
    text, vision = vlm.text_config, vlm.vision_config
    patches = prod(side // vision.patch_size for side in config.resize_imgs_with_padding)
    return ModelShape(
        partial(SmolVLA, config, vlm),
        text,
        vision,
        layers=config.num_vlm_layers if config.num_vlm_layers > 0 else text.num_hidden_layers,
        expert=int(text.hidden_size * config.expert_width_multiplier),
        patches=patches,
        image_tokens=patches // vlm.scale_factor**2,
        text_tokens=config.tokenizer_max_length + 1,
        state_in_vlm=True,
    )


def loss_plan(settings: RobotPolicySettings) -> None:
    """Return None: there is one loss, without choices."""


def with_horizon(parts: SmolVLAParts, horizon: int) -> SmolVLAParts:
    """Return `parts`: the model has no limit of the horizon."""
    return parts


def join(robots: Mapping[str, SmolVLAParts], horizon: int) -> SmolVLAParts:
    """Refuse several robots.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        f"a SmolVLA has the statistics of one robot, and the datasets have several: {', '.join(robots)}",
        code="robots_unsupported",
        where="dataset.sources",
        remedy="give all datasets of a robot the same tag, or train a MolmoAct2",
    )
