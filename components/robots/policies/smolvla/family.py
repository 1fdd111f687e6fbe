"""SmolVLA as a `PolicyFamily`."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from armature.components.robots.policies.model import ModelShape
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.checkpoint import (
    SmolVLAParts,
    empty_model,
    export_lerobot,
    fill_model,
    load_parts,
    make_tiny_policy,
    save_policy,
)
from armature.components.robots.policies.smolvla.model import SmolVLA
from armature.components.robots.policies.smolvla.policy import SmolVLAPlan, SmolVLAPolicy
from armature.components.robots.policies.source import config_folder

__all__ = ["empty_model", "export_lerobot", "fill_model", "load_parts", "make_tiny_policy", "save_policy"]

player, sampling_plan = SmolVLAPolicy, SmolVLAPlan.of


def read_config(settings: RobotPolicySettings) -> SmolVLAParts:
    """Return the parts of a tiny policy, or of a folder or a hub name: they have the configuration of the VLM too."""
    with TemporaryDirectory() as scratch:
        if settings.tiny is not None:
            folder = make_tiny_policy(Path(scratch) / "tiny", settings)
        else:
            folder = config_folder(settings.path or settings.checkpoint_path, settings.revision)
        return load_parts(folder, settings)


def shape(parts: SmolVLAParts) -> ModelShape:
    """Return the sizes of the network."""
    config, vlm = parts.config, parts.vlm
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
        caches=4,
    )


def loss_plan(settings: RobotPolicySettings) -> None:
    """Return None: there is one loss, without choices."""
