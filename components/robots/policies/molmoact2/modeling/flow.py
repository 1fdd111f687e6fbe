"""Flow matching: from noise (time 0) to actions (time 1) along straight lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.context_parallel import to_device
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config


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


# Flow-SDE: one denoising step of a flow-matching policy is drawn from a normal distribution, the others are Euler's.
#
# Time runs from noise (t = 0) to actions (t = 1) in N steps of δ = 1 / N, t_k = k / N. At a point x with velocity v
# the noise is ε = x - t v. The drawn step has
#
#     s_k = η sqrt((1 - t_k) / t_k), with t_1 in place of t_0
#     μ_k = x + δ (v - s_k² ε / (2 (1 - t_k)))
#     x_(k+1) ~ N(μ_k, s_k² δ)
#
# which leaves the marginals of the flow as they are up to the size of a step. Source: πRL (arXiv 2510.25889), there
# with time in the other direction.


def noise_scales(steps: int, noise_level: float) -> Tensor:
    """(N,) float64: s_k of every step.

    Args:
        noise_level: η in the formulas above.

    Raises:
        ConfigurationError: there is one step alone, which ends where nothing is random.
    """
    if steps < 2:
        raise ConfigurationError(
            f"actions are denoised in {steps} step, and Flow-SDE needs two at least",
            code="too_few_denoising_steps",
            where="policy.num_inference_steps",
            remedy="set it to 4 or more",
        )
    times = torch.arange(steps, dtype=torch.float64).clamp(min=1) / steps
    return noise_level * ((1.0 - times) / times).sqrt()


def drift(x: Tensor, velocity: Tensor, time: Tensor | float, sigma: Tensor) -> Tensor:
    """v - sigma² ε / (2 (1 - t)): the velocity itself where sigma is 0. `time` and `sigma` broadcast to x."""
    return velocity - 0.5 * sigma.square() * (x - time * velocity) / (1.0 - time)


def step_logprobs(before: Tensor, after: Tensor, velocity: Tensor, step: Tensor, sigmas: Tensor) -> Tensor:
    """(E, T, D) float64: ln N(after; μ_k, s_k² δ) of every number of the drawn steps.

    In float64, because a ratio of policies is the exponential of a sum over a chunk's numbers.

    Args:
        before, after: x_k and x_(k+1), (E, T, D). velocity: at x_k and t_k, (E, T, D).
        step: (E,) int64, k. sigmas: of every step, as `noise_scales` gives them.
    """
    steps = len(sigmas)
    sigma = sigmas.to(before.device)[step][:, None, None]
    time = (step.double() / steps)[:, None, None]
    x, v = before.double(), velocity.double()
    mean = x + drift(x, v, time, sigma) / steps
    deviation = sigma / math.sqrt(steps)
    return -0.5 * ((after.double() - mean) / deviation).square() - deviation.log() - 0.5 * math.log(2 * math.pi)


def step_divergences(velocity: Tensor, other: Tensor, step: Tensor, sigmas: Tensor) -> Tensor:
    """(E, T, D) float64: KL(N(μ_k, s_k² δ) || N(μ'_k, s_k² δ)) = (μ_k - μ'_k)² / (2 s_k² δ) of every number.

    Args:
        velocity, other: of two policies at x_k and t_k, (E, T, D): v of μ_k, and of μ'_k.
        step, sigmas: as in `step_logprobs`.
    """
    steps = len(sigmas)
    sigma = sigmas.to(velocity.device)[step][:, None, None]
    time = (step.double() / steps)[:, None, None]
    nowhere = torch.zeros_like(velocity, dtype=torch.float64)  # the drift is linear in v, x drops out
    moved = drift(nowhere, velocity.double() - other.double(), time, sigma) / steps
    return 0.5 * (moved / sigma).square() * steps


# Chunks that go on where the robot is: real-time chunking (Black et al. 2025, arXiv 2506.07339).
#
# While a chunk is computed the robot carries out the one before. The velocity of flow matching is pulled to what is
# left of that chunk, Y: with the estimate A1(x) = x + (1 - t) v(x, t) of the actions, weights w of the steps and time
# t, from noise (0) to actions (1),
#
#     v + min(beta, (t^2 + (1 - t)^2) / (t (1 - t))) (Y - A1)^T diag(w) dA1/dx

MOST_GUIDANCE = 5.0
"""beta of the paper."""


def prefix_weights(delay: int, left: int, horizon: int) -> Tensor:
    """(horizon,) float32: 1 for the `delay` steps that are carried out meanwhile, falling to 0 at step `left`."""
    step = torch.arange(horizon, dtype=torch.float64)
    falling = ((left - step) / (left - delay + 1)).clamp(0, 1)
    return (falling * torch.expm1(falling) / math.expm1(1)).float()


def guided_velocity(
    velocity: Callable[[Tensor], Tensor], x: Tensor, time: float, wanted: Tensor, weights: Tensor
) -> Tensor:
    """The velocity at x (N, T, D), pulled to `wanted` (N, T, D) by `weights` (N, T); without a gradient."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        own = velocity(x)
        estimate = x + (1 - time) * own
        (pull,) = torch.autograd.grad(estimate, x, (wanted - estimate.detach()) * weights[..., None])
    scale = min(MOST_GUIDANCE, (time**2 + (1 - time) ** 2) / (time * (1 - time))) if time else MOST_GUIDANCE
    return own.detach() + scale * pull
