"""SmolVLA as a `PolicyFamily`."""

from __future__ import annotations

from collections.abc import Mapping

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.checkpoint import (
    SmolVLAParts,
    export_lerobot,
    load_model,
    load_parts,
    make_tiny_policy,
    save_policy,
)
from armature.components.robots.policies.smolvla.policy import SmolVLAPlan, SmolVLAPolicy, open_policy

__all__ = ["export_lerobot", "load_model", "load_parts", "make_tiny_policy", "open_policy", "save_policy"]

player, sampling_plan = SmolVLAPolicy, SmolVLAPlan.of


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
