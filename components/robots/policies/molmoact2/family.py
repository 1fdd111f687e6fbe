"""MolmoAct2 as a `PolicyFamily`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import (
    empty_model,
    export_lerobot,
    load_model,
    read_model,
    save_policy,
)
from armature.components.robots.policies.molmoact2.checkpoints.parts import PolicyParts, load_parts
from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan, LossPlan
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy, open_policy
from armature.components.robots.policies.norm_stats import norm_stats

__all__ = [
    "empty_model",
    "export_lerobot",
    "load_model",
    "load_parts",
    "make_tiny_policy",
    "open_policy",
    "read_model",
    "save_policy",
]

loss_plan, sampling_plan, player = LossPlan.of, InferencePlan.of, MolmoAct2Policy


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
