"""Flow-SDE: one denoising step of a flow-matching policy is drawn from a normal distribution, the others are Euler's.

Time runs from noise (t = 0) to actions (t = 1) in N steps of δ = 1 / N, t_k = k / N. At a point x with velocity v the
noise is ε = x - t v. The drawn step has

    s_k = η sqrt((1 - t_k) / t_k), with t_1 in place of t_0
    μ_k = x + δ (v - s_k² ε / (2 (1 - t_k)))
    x_(k+1) ~ N(μ_k, s_k² δ)

which leaves the marginals of the flow as they are up to the size of a step. Source: πRL (arXiv 2510.25889), there with
time in the other direction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError


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
