"""Formulas of flow matching, from noise (time 0) to actions (time 1) along straight lines.

They cover the training loss, Flow-SDE (random denoising steps for reinforcement learning) and real-time chunking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.context_parallel import to_device


class FlowConfig(Protocol):
    """Numbers of a policy's configuration: the distribution of `flow_times`, steps, and the width of actions."""

    @property
    def flow_matching_num_steps(self) -> int:
        """Number of denoising steps, where the policy's settings have none."""

    @property
    def flow_matching_time_offset(self) -> float:
        """Smallest time."""

    @property
    def flow_matching_time_scale(self) -> float:
        """Width of the interval of times."""

    @property
    def flow_matching_cutoff(self) -> float:
        """Largest time."""

    @property
    def flow_matching_beta_alpha(self) -> float:
        """First parameter of the beta distribution."""

    @property
    def flow_matching_beta_beta(self) -> float:
        """Second parameter of the beta distribution."""

    @property
    def max_action_dim(self) -> int:
        """Number of dimensions of an action with padding."""


@dataclass(frozen=True)
class FlowSamples:
    """Random times and noise of a flow-matching loss: F of both for each of E examples, float32.

    times: (E, F) in [0, 1]. noise: (E, F, T, dimensions), standard normal in every dimension.

    Example:
        >>> from armature.components.robots.policies.molmoact2.checkpoints.tiny import tiny_config
        >>> from armature.components.robots.policies.settings import TinyPolicySettings
        >>> config = tiny_config(TinyPolicySettings(max_action_dim=8))
        >>> samples = FlowSamples.per_example([5, 7], draws=4, horizon=10, config=config)
        >>> tuple(samples.times.shape), tuple(samples.noise.shape)
        ((2, 4), (2, 4, 10, 8))
    """

    times: Tensor
    noise: Tensor

    @classmethod
    def draw(
        cls, examples: int, draws: int, horizon: int, config: FlowConfig, generator: torch.Generator
    ) -> FlowSamples:
        """Draw times and noise for a whole batch, on the generator's device: first all times, then all noise."""
        times = flow_times((examples, draws), config, generator)
        shape = (examples, draws, horizon, config.max_action_dim)
        return cls(times, torch.randn(shape, generator=generator, device=generator.device))

    @classmethod
    def per_example(cls, seeds: Sequence[int], draws: int, horizon: int, config: FlowConfig) -> FlowSamples:
        """Draw times and noise of each example from the example's own seed, on the CPU.

        They do not depend on the example's batch, row or rank.
        """
        each = [cls.draw(1, draws, horizon, config, torch.Generator().manual_seed(seed)) for seed in seeds]
        return cls(torch.cat([one.times for one in each]), torch.cat([one.noise for one in each]))

    def to(self, device: torch.device | str) -> FlowSamples:
        """Return the samples on `device`."""
        device = torch.device(device)
        return FlowSamples(to_device(self.times, device), to_device(self.noise, device))


def flow_times(shape: tuple[int, ...], config: FlowConfig, generator: torch.Generator) -> Tensor:
    """Draw times t = offset + s Beta(alpha, beta) with s = min(cutoff, offset + scale) - offset, float32."""
    offset = config.flow_matching_time_offset
    spread = min(config.flow_matching_cutoff, offset + config.flow_matching_time_scale) - offset
    concentrations = torch.tensor(
        [config.flow_matching_beta_alpha, config.flow_matching_beta_beta], device=generator.device
    ).expand(*shape, 2)
    # torch.distributions.Beta draws in this way, but does not take a generator.
    return offset + spread * torch._sample_dirichlet(concentrations, generator=generator)[..., 0]


def noisy_actions(actions: Tensor, draws: FlowSamples, used: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the points x_t = (1 - t) noise + t actions and the velocities actions - noise, (E, F, T, dimensions) each.

    Args:
        actions: (E, T, dimensions).
        used: (E, dimensions), False for dimensions that the robot does not have, whose noise and actions are set to 0;
            None: all dimensions are used.
    """
    target, noise = actions.float()[:, None], draws.noise.float()
    if used is not None:
        target, noise = target * used[:, None, None], noise * used[:, None, None]
    times = draws.times.float()[..., None, None]
    return (1.0 - times) * noise + times * target, target - noise


def midpoints(count: int, device: torch.device) -> Tensor:
    """Return the middles of `count` equal parts of [0, 1], shape (F,) float32."""
    return (torch.arange(count, device=device) + 0.5) / count


def loss_logprobs(velocity: Tensor, actions: Tensor, noise: Tensor) -> Tensor:
    """Negative flow-matching losses in place of log-probs: -mean_f (v_f - (actions - noise_f))², (E, T, D) float64.

    The difference of two policies' sums is the log-ratio of FPO (arXiv 2507.21053), because the flow-matching loss is a
    bound of the negative log-likelihood, up to the weights of times.

    Args:
        velocity: v_f at the points x_f = (1 - t_f) noise_f + t_f actions, (E, F, T, D).
        actions: (E, T, D).
        noise: (E, F, T, D).
    """
    return -(velocity.double() - (actions[:, None] - noise).double()).square().mean(1)


def flow_errors(velocity: Tensor, target: Tensor, valid: Tensor | None, used: Tensor | None) -> Tensor:
    """Mean squared error of each example's velocity, shape (E,) float32.

    Padded steps count as steps with error 0: a chunk with squared errors of 1 that is half padding has 0.5.

    Args:
        velocity, target: (E, F, T, dimensions).
        valid: (E, T), False for padded steps; None: all steps are valid.
        used: (E, dimensions), False for padded dimensions, which do not count; None: all dimensions are used.
    """
    squares = (velocity.float() - target).square()
    if valid is not None:
        squares = squares * valid[:, None, :, None]
    if used is None:
        return squares.mean((1, 2, 3))
    counted = used[:, None, None].to(squares.dtype)
    return ((squares * counted).sum(-1) / counted.sum(-1).clamp(min=1.0)).mean((1, 2))


# --- Flow-SDE ---
#
# One denoising step of a flow-matching policy is drawn from a normal distribution; the others are Euler steps.
#
# Time runs from noise (t = 0) to actions (t = 1) in N steps of δ = 1 / N, t_k = k / N. At a point x with velocity v
# the noise is ε = x - t v. The random step is
#
#     s_k = η sqrt((1 - t_k) / t_k), with t_1 in place of t_0
#     μ_k = x + δ (v - s_k² ε / (2 (1 - t_k)))
#     x_(k+1) ~ N(μ_k, s_k² δ)
#
# It preserves the marginal distributions of the flow, up to an error of the order of δ. Source: πRL (arXiv 2510.25889),
# where time runs in the other direction.


def noise_scales(steps: int, noise_level: float) -> Tensor:
    """Return s_k of all steps, shape (N,) float64.

    Args:
        noise_level: η in the formulas above.

    Raises:
        ConfigurationError: `steps` is 1; s_k of a single step would be 0.
    """
    if steps < 2:
        raise ConfigurationError(
            f"actions are denoised in {steps} step, but Flow-SDE needs at least two",
            code="too_few_denoising_steps",
            where="policy.num_inference_steps",
            remedy="set it to 4 or more",
        )
    times = torch.arange(steps, dtype=torch.float64).clamp(min=1) / steps
    return noise_level * ((1.0 - times) / times).sqrt()


def drift(x: Tensor, velocity: Tensor, time: Tensor | float, sigma: Tensor) -> Tensor:
    """Return v - sigma² ε / (2 (1 - t)), which is the velocity if sigma is 0; `time` and `sigma` broadcast to x."""
    return velocity - 0.5 * sigma.square() * (x - time * velocity) / (1.0 - time)


def step_logprobs(before: Tensor, after: Tensor, velocity: Tensor, step: Tensor, sigmas: Tensor) -> Tensor:
    """Log-probs ln N(after; μ_k, s_k² δ) of each number of the random steps, (E, T, D) float64.

    They are float64 because a policy ratio is the exponential of their sum over a chunk.

    Args:
        before, after: x_k and x_(k+1), (E, T, D).
        velocity: Velocity at x_k and t_k, (E, T, D).
        step: (E,) int64, k.
        sigmas: s_k of all steps, from `noise_scales`.
    """
    steps = len(sigmas)
    sigma = sigmas.to(before.device)[step][:, None, None]
    time = (step.double() / steps)[:, None, None]
    x, v = before.double(), velocity.double()
    mean = x + drift(x, v, time, sigma) / steps
    deviation = sigma / math.sqrt(steps)
    return -0.5 * ((after.double() - mean) / deviation).square() - deviation.log() - 0.5 * math.log(2 * math.pi)


def step_divergences(velocity: Tensor, other: Tensor, step: Tensor, sigmas: Tensor) -> Tensor:
    """KL(N(μ_k, s_k² δ) || N(μ'_k, s_k² δ)) = (μ_k - μ'_k)² / (2 s_k² δ) of each number, (E, T, D) float64.

    Args:
        velocity, other: Velocities of two policies at x_k and t_k, (E, T, D), from which μ_k and μ'_k follow.
        step, sigmas: See `step_logprobs`.
    """
    steps = len(sigmas)
    sigma = sigmas.to(velocity.device)[step][:, None, None]
    time = (step.double() / steps)[:, None, None]
    zero = torch.zeros_like(velocity, dtype=torch.float64)  # the drift is linear in v, so x cancels out
    moved = drift(zero, velocity.double() - other.double(), time, sigma) / steps
    return 0.5 * (moved / sigma).square() * steps


# --- Real-time chunking (Black et al. 2025, arXiv 2506.07339) ---
#
# While a chunk is computed, the robot executes the previous chunk. So that the new chunk continues the motion, its
# velocity is pulled towards the rest Y of the previous chunk. With the estimate A1(x) = x + (1 - t) v(x, t) of the
# actions, weights w of the steps and time t from noise (0) to actions (1), the guided velocity is
#
#     v + min(beta, (t^2 + (1 - t)^2) / (t (1 - t))) (Y - A1)^T diag(w) dA1/dx

MOST_GUIDANCE = 5.0
"""Largest guidance weight in real-time chunking; called beta in the formula above and in the paper."""


def prefix_weights(delay: int, left: int, horizon: int) -> Tensor:
    """Return the weights w, shape (horizon,) float32: how strongly each step is pulled to the previous chunk.

    They are 1 for the first `delay` steps, which the robot executes during the computation, and fall to 0 at step
    `left`, where the previous chunk ends.
    """
    step = torch.arange(horizon, dtype=torch.float64)
    falling = ((left - step) / (left - delay + 1)).clamp(0, 1)
    return (falling * torch.expm1(falling) / math.expm1(1)).float()


def guided_velocity(
    velocity: Callable[[Tensor], Tensor], x: Tensor, time: float, wanted: Tensor, weights: Tensor
) -> Tensor:
    """Return the velocity at x (N, T, D), pulled towards `wanted` (N, T, D) by `weights` (N, T), without a gradient."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        unguided = velocity(x)
        estimate = x + (1 - time) * unguided
        (pull,) = torch.autograd.grad(estimate, x, (wanted - estimate.detach()) * weights[..., None])
    scale = min(MOST_GUIDANCE, (time**2 + (1 - time) ** 2) / (time * (1 - time))) if time else MOST_GUIDANCE
    return unguided.detach() + scale * pull
