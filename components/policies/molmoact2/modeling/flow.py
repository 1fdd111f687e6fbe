"""Flow matching: from noise (time 0) to actions (time 1) along straight lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armature.components.models.transfer import to_device
from armature.components.policies.molmoact2.configuration import MolmoAct2Config


@dataclass(frozen=True)
class FlowSamples:
    """What is random in a flow-matching loss: F times and noises for each of E examples, float32.

    times: (E, F) in [0, 1], noise: (E, F, T, dimensions), standard normal in every dimension.
    """

    times: Tensor
    noise: Tensor

    @classmethod
    def draw(
        cls, examples: int, draws: int, horizon: int, config: MolmoAct2Config, generator: torch.Generator
    ) -> FlowSamples:
        """Draw for a batch at once, first all times and then all noises, on the generator's device."""
        times = flow_times((examples, draws), config, generator)
        shape = (examples, draws, horizon, config.max_action_dim)
        return cls(times, torch.randn(shape, generator=generator, device=generator.device))

    @classmethod
    def per_example(cls, seeds: Sequence[int], draws: int, horizon: int, config: MolmoAct2Config) -> FlowSamples:
        """Draw for each example from its own seed, whatever batch, row or rank it comes to; on the CPU."""
        each = [cls.draw(1, draws, horizon, config, torch.Generator().manual_seed(seed)) for seed in seeds]
        return cls(torch.cat([one.times for one in each]), torch.cat([one.noise for one in each]))

    def to(self, device: torch.device | str) -> FlowSamples:
        device = torch.device(device)
        return FlowSamples(to_device(self.times, device), to_device(self.noise, device))


def flow_times(shape: tuple[int, ...], config: MolmoAct2Config, generator: torch.Generator) -> Tensor:
    """t = offset + s Beta(alpha, beta), s = min(cutoff, offset + scale) - offset; float32."""
    offset = config.flow_matching_time_offset
    spread = min(config.flow_matching_cutoff, offset + config.flow_matching_time_scale) - offset
    concentrations = torch.tensor(
        [config.flow_matching_beta_alpha, config.flow_matching_beta_beta], device=generator.device
    ).expand(*shape, 2)
    # What torch.distributions.Beta draws, which takes no generator.
    return offset + spread * torch._sample_dirichlet(concentrations, generator=generator)[..., 0]


def noisy_actions(actions: Tensor, draws: FlowSamples, used: Tensor | None) -> tuple[Tensor, Tensor]:
    """The points x_t = (1 - t) noise + t actions and the velocities actions - noise, both (E, F, T, dimensions).

    Args:
        actions: (E, T, dimensions). used: (E, dimensions), False where a dimension is not the robot's: noise and
            actions are 0 there; None: all dimensions count.
    """
    target, noise = actions.float()[:, None], draws.noise.float()
    if used is not None:
        target, noise = target * used[:, None, None], noise * used[:, None, None]
    times = draws.times.float()[..., None, None]
    return (1.0 - times) * noise + times * target, target - noise


def midpoints(count: int, device: torch.device) -> Tensor:
    """(F,) float32: the middles of as many equal parts of [0, 1]."""
    return (torch.arange(count, device=device) + 0.5) / count


def loss_logprobs(velocity: Tensor, actions: Tensor, noise: Tensor) -> Tensor:
    """(E, T, D) float64: what stands for the log-prob of every number, -mean_f (v - (actions - noise_f))².

    The difference of two policies' sums is the log-ratio of FPO (arXiv 2507.21053): the flow-matching loss bounds the
    negative log-likelihood, up to its weights of times.

    Args:
        velocity: at x_f = (1 - t_f) noise_f + t_f actions, (E, F, T, D). actions: (E, T, D). noise: (E, F, T, D).
    """
    return -(velocity.double() - (actions[:, None] - noise).double()).square().mean(1)


def flow_errors(velocity: Tensor, target: Tensor, valid: Tensor | None, used: Tensor | None) -> Tensor:
    """Mean squared error of every example: (E,) float32.

    Padded steps count as steps without error: a chunk of unit errors that is half padding has 0.5.

    Args:
        velocity, target: (E, F, T, dimensions). valid: (E, T) or None. used: (E, dimensions) or None.
    """
    squares = (velocity.float() - target).square()
    if valid is not None:
        squares = squares * valid[:, None, :, None]
    if used is None:
        return squares.mean((1, 2, 3))
    counted = used[:, None, None].to(squares.dtype)
    return ((squares * counted).sum(-1) / counted.sum(-1).clamp(min=1.0)).mean((1, 2))
