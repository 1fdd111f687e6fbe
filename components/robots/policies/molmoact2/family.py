"""MolmoAct2 as a `PolicyFamily`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from armature.components.robots.policies.model import ModelShape
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import (
    empty_model,
    export_lerobot,
    fill_model,
    read_model,
    save_policy,
)
from armature.components.robots.policies.molmoact2.checkpoints.parts import PolicyParts, load_parts
from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy, tiny_config
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan, LossPlan
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.policies.norm_stats import norm_stats
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.source import CONFIG, config_folder, read_json

__all__ = [
    "empty_model",
    "export_lerobot",
    "fill_model",
    "load_parts",
    "make_tiny_policy",
    "read_model",
    "save_policy",
]

loss_plan, sampling_plan, player = LossPlan.of, InferencePlan.of, MolmoAct2Policy
TEXT_TOKENS = 100
"""Assumed number of text tokens in a prompt: task, setup and state."""


def read_config(settings: RobotPolicySettings) -> MolmoAct2Config:
    """Return the configuration of a tiny policy, or the config.json of a folder or a hub name."""
    if settings.tiny is not None:
        return tiny_config(settings.tiny)
    file = config_folder(settings.checkpoint_path or settings.path, settings.revision) / CONFIG
    return MolmoAct2Config.from_dict(read_json(file), str(file))


def shape(config: MolmoAct2Config) -> ModelShape:
    """Return the sizes of the network."""
    text, vision = config.text_config, config.vit_config
    rows, columns = (side // vision.image_patch_size for side in vision.image_default_input_size)
    return ModelShape(
        partial(MolmoAct2, config),
        text,
        vision,
        layers=text.num_hidden_layers,
        expert=config.action_expert_config.hidden_size,
        patches=rows * columns,
        image_tokens=(-(-rows // 2)) ** 2,
        text_tokens=TEXT_TOKENS,
    )


def with_horizon(parts: PolicyParts, horizon: int) -> PolicyParts:
    """Return `parts` for a model that predicts chunks of at least `horizon` actions."""
    if parts.config.max_action_horizon >= horizon:
        return parts
    return replace(parts, config=parts.config.model_copy(update={"max_action_horizon": horizon}))


def join(robots: Mapping[str, PolicyParts], horizon: int) -> PolicyParts:
    """Return parts with the statistics of every robot; a user of the checkpoint selects a robot by its norm_tag."""
    first = next(iter(robots.values()))
    stats = norm_stats({tag: parts.robot for tag, parts in robots.items() if parts.robot is not None}, first.settings)
    settings = first.settings.model_copy(update={"chunk_size": horizon})
    return replace(first, robot=None, stats=stats, settings=settings)
