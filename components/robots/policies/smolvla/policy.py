"""SmolVLA as a `RobotPolicy`: predict chunks of actions, in the dataset's units, from observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armature.components.robots.policies.model import denoising_steps
from armature.components.robots.policies.player import FlowPolicy
from armature.components.robots.policies.sampling import FlowSampler, SharedConditions
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.configuration import SmolVLAConfig
from armature.components.robots.policies.smolvla.model import Prefix, SmolVLA
from armature.components.robots.policies.smolvla.processor import SmolVLABatch, SmolVLAExample, SmolVLAProcessor


@dataclass(frozen=True)
class SmolVLAPlan:
    """Number of Euler steps. As in LeRobot, all dimensions have noise, and only the robot's count in a loss.

    width: number of dimensions with padding.
    """

    steps: int
    width: int

    @classmethod
    def of(cls, settings: RobotPolicySettings, config: SmolVLAConfig) -> SmolVLAPlan:
        """Return the plan for a policy's settings; the checkpoint's configuration fills in the number of steps."""
        return cls(denoising_steps(settings, config), config.max_action_dim)

    def dimensions(self, batch: SmolVLABatch) -> tuple[None, Tensor]:
        """Return None for all dimensions, and the robot's, (E, max_action_dim); see `SamplingPlan`."""
        robots = torch.arange(self.width, device=batch.state.device) < batch.action_dimensions
        return None, robots.expand(batch.examples, -1)


@dataclass(frozen=True)
class PrefixConditions(SharedConditions):
    """The prefix that the action expert attends to in all denoising steps."""

    prefix: Prefix


class SmolVLASampler(FlowSampler[SmolVLA, SmolVLABatch]):
    """Samples chunks of a SmolVLA; see `FlowSampler`."""

    def __init__(self, model: SmolVLA, processor: SmolVLAProcessor, settings: RobotPolicySettings, group: int) -> None:
        plan, width = SmolVLAPlan.of(settings, model.config), model.config.tokenizer_max_length
        super().__init__(model, plan, settings.chunk_size, group, width)
        self._processor = processor

    def _batch(self, examples: Sequence[SmolVLAExample], width: int) -> SmolVLABatch:
        return self._processor.batch(examples, multiple=width)

    def _conditions(self, observed: Sequence[Tensor]) -> PrefixConditions:
        batch = SmolVLABatch.of_observed(observed)
        used = torch.ones(batch.examples, 1, self.model.config.max_action_dim, device=self.device)
        return PrefixConditions(used, self.model.encode(batch, self.model.action_expert))

    def _expert(self, x: Tensor, time: int | Tensor, conditions: PrefixConditions) -> tuple[Tensor, Tensor]:
        times = x.new_full((len(x),), time / self.plan.steps, dtype=torch.float64) if isinstance(time, int) else time
        times = times.double().expand(len(x))
        velocity, states = self.model.action_expert.velocity(x, times, conditions.prefix)
        return velocity.to(x.dtype), states


class SmolVLAPolicy(FlowPolicy):
    """A SmolVLA model with its processor; see `FlowPolicy`."""

    def _make_sampler(self, model: SmolVLA, rows: int) -> SmolVLASampler:
        return SmolVLASampler(model, self._processor, self._settings, rows)
