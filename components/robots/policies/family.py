"""The contract of a family of policies, so that one learner trains all of them. Each family is a folder beside this.

A family has a module `policies/NAME/family.py` with the functions of `PolicyFamily`. Its model is a `PolicyModel` whose
time runs from noise (0) to actions (1), as in `flow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.source import CHECKPOINT, locate
from armature.components.robots.policies.flow import FlowConfig
from armature.components.robots.policies.inputs import ModelProcessor
from armature.components.robots.policies.model import ModelShape, SamplingPlan
from armature.components.robots.policies.norm_stats import RobotMetadata
from armature.components.robots.policies.settings import InferenceMode, RobotPolicySettings
from armature.components.robots.policies.source import POLICY, POLICY_WITHOUT_WEIGHTS, read_settings
from armature.components.training.processes import TrainerProcesses


class CheckpointParts(Protocol):
    """A checkpoint without its weights."""

    @property
    def settings(self) -> RobotPolicySettings:
        """The policy's settings."""

    @property
    def robot(self) -> RobotMetadata | None:
        """Statistics to normalize by."""

    @property
    def config(self) -> FlowConfig:
        """The model's configuration."""

    def processor(self, horizon: int | None = None) -> ModelProcessor:
        """Return the processor; with `horizon`, examples have that many actions."""


class PolicyFamily(Protocol):
    """Functions of the module `policies/NAME/family.py`. Parts, models and processors are the family's own."""

    def make_tiny_policy(self, folder: Path, settings: RobotPolicySettings) -> Path:
        """Write a checkpoint with random weights to `folder`."""

    def load_parts(
        self, source: str | Path, settings: RobotPolicySettings | None = None, robot: RobotMetadata | None = None
    ) -> Any:
        """Read everything but the weights."""

    def with_horizon(self, parts: Any, horizon: int) -> Any:
        """Return `parts` for a model that predicts chunks of at least `horizon` actions.

        A family without `join` trains one robot at a time and needs neither.
        """

    def join(self, robots: Mapping[str, Any], horizon: int) -> Any:
        """Return the parts of a checkpoint for several robots, which are given by tag."""

    def read_config(self, settings: RobotPolicySettings) -> Any:
        """Return the network's configuration: of a tiny policy, or of a folder or a hub name."""

    def shape(self, config: Any) -> ModelShape:
        """Return the sizes of the network."""

    def empty_model(self, parts: Any) -> Any:
        """Return the model in evaluation mode on the meta device, without memory for its weights."""

    def fill_model(self, model: Any, folder: Path) -> None:
        """Copy the weights of a checkpoint into a model, in place, including its value head if it has one.

        Raises:
            DataError: a weight is missing, unknown, or has another shape.
        """

    def read_model(self, source: str | Path, parts: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the model on the meta device, and separately its weights.

        A family without this function cannot be sharded.
        """

    def save_policy(self, folder: Path, parts: Any, weights: Mapping[str, Tensor]) -> Path:
        """Write a self-contained checkpoint."""

    def export_lerobot(self, source: Path, out: Path, base: str | None = None) -> None:
        """Write the checkpoint in `source` to the folder `out` in LeRobot's layout, on the released VLM `base`."""

    def loss_plan(self, settings: RobotPolicySettings) -> Any:
        """Return the plan that the model's `forward` takes."""

    def sampling_plan(self, settings: RobotPolicySettings, config: Any) -> SamplingPlan:
        """Return the plan of sampling for a policy's settings and the checkpoint's configuration."""

    def player(
        self,
        model: Any,
        processor: Any,
        settings: RobotPolicySettings,
        mode: InferenceMode,
        rows: int,
        refuse_undecoded: bool = False,
    ) -> Any:
        """Return the `FlowPolicy` that predicts with a model."""


def family(name: str) -> PolicyFamily:
    """Return the functions of a family of policies.

    Example:
        >>> family("smolvla").loss_plan(RobotPolicySettings(family="smolvla", action_normalization="mean_std"))
    """
    return cast(PolicyFamily, import_module(f"armature.components.robots.policies.{name}.family"))


def family_at(source: Path) -> PolicyFamily:
    """Return the family of the policy in a checkpoint's folder or an artifact, by its `policy.json`."""
    saved = read_settings(source) or read_settings(source / CHECKPOINT)
    saved = saved or read_settings(locate(source, kind=POLICY_WITHOUT_WEIGHTS))
    return family(saved.family if saved is not None else "molmoact2")


def refuse_sharding(name: str, processes: TrainerProcesses) -> None:
    """Check that a family's model can be sharded, if these processes of a training shard it.

    Raises:
        ConfigurationError: it cannot.
    """
    if processes.sharding is not None and not hasattr(family(name), "read_model"):
        raise ConfigurationError(
            f"a policy of the family {name} cannot be sharded over GPUs",
            code="sharding_unsupported",
            where="machine.trainer.sharding",
            remedy='set it to "none": each GPU then holds the whole policy',
        )


def load_model(source: str | Path, parts: CheckpointParts, device: str | torch.device = "cpu") -> Any:
    """Return the model of `parts` with the weights of the checkpoint `source`, in evaluation mode.

    Weights are read one by one, so at most one tensor is in memory besides the model.

    Raises:
        DataError: a weight is missing, unknown, or has another shape.
    """
    kind = family(parts.settings.family)
    model = kind.empty_model(parts).to_empty(device=device)
    kind.fill_model(model, locate(source, parts.settings.revision, POLICY))
    return model


def export_lerobot(source: Path, out: Path, base: str | None) -> None:
    """Write the checkpoint in `source` to the folder `out` in LeRobot's layout; see `PolicyFamily`."""
    family_at(source).export_lerobot(source, out, base)
