"""The contract of a family of policies, so that one learner trains all of them. Each family is a folder beside this.

A family has a module `policies/NAME/family.py` with the functions of `PolicyFamily`. Its model is a `PolicyModel` whose
time runs from noise (0) to actions (1), as in `flow`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor, nn

from armature.components.models.source import CHECKPOINT, locate
from armature.components.robots.policies.flow import FlowConfig, FlowSamples
from armature.components.robots.policies.norm_stats import RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings, Semantics
from armature.components.robots.policies.source import POLICY_WITHOUT_WEIGHTS, read_settings

Precision = Literal["float32", "bfloat16"]


class LossDenominators(NamedTuple):
    """Denominators of an update's losses.

    flow: of the flow-matching loss, in the model's own unit: examples in MolmoAct2, numbers of actions in SmolVLA.
    token_weight: sum of the labeled tokens' weights; 0 if no tokens are trained.

    If every micro-batch uses the denominators of the whole update, the losses of the micro-batches add up to the
    update's loss.
    """

    flow: float
    token_weight: float = 0.0


class PolicyLosses(NamedTuple):
    """Losses of a batch: total = flow + cross_entropy + z, scalars with a gradient; a part that is not trained is 0.

    The per-example losses (E,) have no gradient.
    The class is a tuple because FSDP finds tensors with gradients only in tuples, lists and dicts.
    """

    total: Tensor
    flow: Tensor
    cross_entropy: Tensor
    z: Tensor
    flow_per_example: Tensor
    cross_entropy_per_example: Tensor
    z_per_example: Tensor


class ModelBatch(Protocol):
    """Encoded examples of one forward pass."""

    @property
    def input_ids(self) -> Tensor:
        """Token ids of the rows with padding, (B, L) int64."""

    @property
    def actions(self) -> Tensor | None:
        """Normalized actions (E, T, dimensions); None if the batch is for inference, or only tokens are trained."""

    @property
    def examples(self) -> int:
        """Number of examples, E."""

    def to(self, device: torch.device) -> Self:
        """Return the batch on `device`."""


class ModelProcessor(Protocol):
    """Encodes observations of one robot."""

    def encode(self, observation: Any, actions: Any = None, padding: Any = None, where: str = "") -> Any:
        """Return the example of an observation, and for training of the actions that followed it."""

    def batch(self, examples: Sequence[Any], rows: Sequence[Sequence[int]] | None, multiple: int) -> ModelBatch:
        """Make a batch with one example in each row, or with the examples whose indices `rows` lists."""


class PolicyModel(nn.Module, ABC):
    """A policy's network with its training losses: a VLM, and an action expert that is trained by flow matching."""

    untrained: tuple[str, ...] = ()
    """Beginnings of the names of parameters that never get a gradient. They stay frozen and get no adapters."""

    vlm: nn.Module
    action_expert: nn.Module
    precision: Precision

    @abstractmethod
    def embeddings(self, semantics: Semantics) -> list[str]:
        """Return the names of the parameters that `freeze_embedding` freezes."""

    @abstractmethod
    def denominators(self, batch: Any, plan: Any) -> LossDenominators:
        """Return the denominators of the losses of a single batch."""

    @abstractmethod
    def forward(
        self, batch: Any, draws: FlowSamples | None, plan: Any, denominators: LossDenominators | None = None
    ) -> PolicyLosses:
        """Compute the losses of a batch; without `denominators`, the batch is the whole update.

        Args:
            plan: The result of `PolicyFamily.loss_plan`.
        """

    def checkpoint_gradients(self, active: bool) -> None:
        """Turn activation checkpointing in training on or off."""

    def compile_layers(self, *, dynamic: bool, split: bool = False) -> None:
        """Compile the layers at their first call."""

    def freeze_vlm(self, device: torch.device) -> None:
        """Prepare for training with a VLM that is frozen from now on."""


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

    def processor(self, horizon: int | None = None) -> Any:
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
        """Return `parts` for a model that predicts chunks of at least `horizon` actions."""

    def join(self, robots: Mapping[str, Any], horizon: int) -> Any:
        """Return the parts of a checkpoint for several robots, which are given by tag."""

    def empty_model(self, parts: Any) -> Any:
        """Return the model on the meta device. A family without `read_model` cannot be sharded and needs neither."""

    def load_model(self, source: str | Path, parts: Any, device: str | torch.device = "cpu") -> Any:
        """Return the model with the weights of `source`."""

    def read_model(self, source: str | Path, parts: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the model on the meta device, and separately its weights."""

    def save_policy(self, folder: Path, parts: Any, weights: Mapping[str, Tensor]) -> Path:
        """Write a self-contained checkpoint."""

    def export_lerobot(self, source: Path, out: Path, base: str | None = None) -> None:
        """Write the checkpoint in `source` to the folder `out` in LeRobot's layout, on the released VLM `base`."""

    def loss_plan(self, settings: RobotPolicySettings) -> Any:
        """Return the plan that the model's `forward` takes."""

    def player(
        self,
        model: Any,
        processor: Any,
        settings: RobotPolicySettings,
        mode: Literal["continuous", "discrete"],
        rows: int,
    ) -> Any:
        """Return the `RobotPolicy` that predicts with a model."""

    def open_policy(self, source: Path, mode: Literal["continuous", "discrete"], rows: int, **options: Any) -> Any:
        """Load the policy of an artifact or a checkpoint for inference."""


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


def export_lerobot(source: Path, out: Path, base: str | None) -> None:
    """Write the checkpoint in `source` to the folder `out` in LeRobot's layout; see `PolicyFamily`."""
    family_at(source).export_lerobot(source, out, base)
