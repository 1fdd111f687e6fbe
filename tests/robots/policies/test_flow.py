"""Flow matching and Flow-SDE, compared with formulas for single numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from armature.components.robots.policies.flow import (
    FlowSamples,
    drift,
    flow_errors,
    flow_times,
    noise_scales,
    noisy_actions,
    step_divergences,
    step_logprobs,
)
from tests.refusals import refused
from tests.robots.policies.molmoact2.examples import CONFIG, DIMENSIONS, HORIZON


@pytest.mark.parametrize("cutoff", [1.0, 0.6])
def test_flow_times_follow_the_shifted_beta_distribution(cutoff: float) -> None:
    config = CONFIG.model_copy(update={"flow_matching_cutoff": cutoff})
    times = flow_times((20_000,), config, torch.Generator().manual_seed(0)).numpy()
    spread = min(cutoff, 1.0) - 0.001
    assert times.dtype == np.float32
    assert times.min() >= 0.001 - 1e-6
    assert times.max() <= 0.001 + spread + 1e-6
    assert stats.kstest((times - 0.001) / spread, stats.beta(1.0, 1.5).cdf).pvalue > 0.01


def test_batch_draws_all_times_before_all_noise() -> None:
    draws = FlowSamples.draw(3, 2, HORIZON, CONFIG, torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    assert torch.equal(draws.times, flow_times((3, 2), CONFIG, generator))
    assert torch.equal(draws.noise, torch.randn(3, 2, HORIZON, DIMENSIONS, generator=generator))


def test_flow_samples_depend_only_on_the_seed() -> None:
    many = FlowSamples.per_example([9, 1, 5], 2, HORIZON, CONFIG)
    one = FlowSamples.per_example([1], 2, HORIZON, CONFIG)
    assert torch.equal(many.times[1:2], one.times)
    assert torch.equal(many.noise[1:2], one.noise)
    assert len(many.times.unique()) == 6


def test_points_interpolate_noise_and_actions() -> None:
    actions = torch.randn(1, HORIZON, DIMENSIONS)
    noise = torch.randn(1, 3, HORIZON, DIMENSIONS)
    points, target = noisy_actions(actions, FlowSamples(torch.tensor([[0.0, 0.25, 1.0]]), noise), None)
    torch.testing.assert_close(points[0, 0], noise[0, 0])
    torch.testing.assert_close(points[0, 1], 0.75 * noise[0, 1] + 0.25 * actions[0])
    torch.testing.assert_close(points[0, 2], actions[0])
    torch.testing.assert_close(target[0, 1], actions[0] - noise[0, 1])


def test_padded_dimensions_have_no_noise_and_no_error() -> None:
    used = torch.arange(DIMENSIONS)[None] < 3
    draws = FlowSamples.per_example([0], 2, HORIZON, CONFIG)
    points, target = noisy_actions(torch.ones(1, HORIZON, DIMENSIONS), draws, used)
    assert not points[..., 3:].any()
    assert not target[..., 3:].any()
    velocity = target.clone()
    velocity[..., :3] += 1.0
    velocity[..., 3:] += 7.0
    torch.testing.assert_close(flow_errors(velocity, target, None, used), torch.ones(1))
    all_count = (3 * 1.0 + (DIMENSIONS - 3) * 49.0) / DIMENSIONS
    torch.testing.assert_close(flow_errors(velocity, target, None, None), torch.tensor([all_count]))


def test_half_a_chunk_of_padding_halves_the_flow_error() -> None:
    target = torch.zeros(1, 2, 4, DIMENSIONS)
    valid = torch.tensor([[True, True, False, False]])
    torch.testing.assert_close(flow_errors(target + 1.0, target, valid, None), torch.tensor([0.5]))


TARGET_MEAN, TARGET_STD = 0.4, 0.3


def test_step_logprobs_equal_the_formula() -> None:
    steps, level = 4, 0.7
    random = torch.Generator().manual_seed(0)
    before, after, velocity = (torch.randn(steps, 2, 3, generator=random) for _ in range(3))
    actual = step_logprobs(before, after, velocity, torch.arange(steps), noise_scales(steps, level))
    assert actual.dtype == torch.float64
    for k in range(steps):
        t, width = k / steps, 1 / steps
        base = t if k else width
        sigma = level * math.sqrt((1 - base) / base)
        for row in range(2):
            for column in range(3):
                x, y, v = (float(each[k, row, column]) for each in (before, after, velocity))
                noise, action = x - t * v, x + (1 - t) * v
                mean = noise * (1 - t - width - sigma**2 * width / (2 * (1 - t))) + action * (t + width)
                std = sigma * math.sqrt(width)
                expected = -0.5 * ((y - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
                assert float(actual[k, row, column]) == pytest.approx(expected, rel=1e-12)


def test_step_divergences_equal_torch_kl() -> None:
    steps, level = 4, 0.7
    random = torch.Generator().manual_seed(1)
    before, velocity, other = (torch.randn(steps, 2, 3, generator=random).double() for _ in range(3))
    actual = step_divergences(velocity, other, torch.arange(steps), noise_scales(steps, level))
    for k in range(steps):
        t, width = k / steps, 1 / steps
        base = t if k else width
        sigma = level * math.sqrt((1 - base) / base)
        normals = []
        for v in (velocity[k], other[k]):
            noise, action = before[k] - t * v, before[k] + (1 - t) * v
            mean = noise * (1 - t - width - sigma**2 * width / (2 * (1 - t))) + action * (t + width)
            normals.append(torch.distributions.Normal(mean, sigma * math.sqrt(width)))
        expected = torch.distributions.kl_divergence(*normals)
        torch.testing.assert_close(actual[k], expected, rtol=1e-10, atol=0)


def exact_velocity(x: float, t: float) -> float:
    """Velocity E[action - noise | x] of the flow from N(0, 1) to the target distribution."""
    variance = (1 - t) ** 2 + (t * TARGET_STD) ** 2
    return TARGET_MEAN + (t * TARGET_STD**2 - (1 - t)) / variance * (x - t * TARGET_MEAN)


def moments(steps: int, sigmas: torch.Tensor) -> tuple[float, float]:
    """Return the exact mean and variance at t = 1; they are exact because each step is linear in x."""
    mean, variance = 0.0, 1.0
    for k in range(steps):
        t, sigma = k / steps, sigmas[k]

        def moved(x: float, t: float = t, sigma: torch.Tensor = sigma) -> float:
            return x + float(drift(torch.tensor(x), torch.tensor(exact_velocity(x, t)), t, sigma)) / steps

        slope = moved(1.0) - moved(0.0)
        mean, variance = moved(mean), slope**2 * variance + float(sigma) ** 2 / steps
    return mean, variance


@pytest.mark.parametrize(
    ("steps", "level", "euler", "one", "every"),
    [(10, 0.5, 0.246, 0.251, 0.271), (4, 0.5, 0.177, 0.201, 0.238), (3, 0.5, 0.141, 0.191, None)],
)
def test_flow_sde_has_exact_moments_for_a_normal_target(
    steps: int, level: float, euler: float, one: float, every: float | None
) -> None:
    sigmas = noise_scales(steps, level)
    mean, variance = moments(steps, torch.zeros(steps))
    assert mean == pytest.approx(TARGET_MEAN, abs=1e-6) and math.sqrt(variance) == pytest.approx(euler, abs=2e-3)
    drawn = [moments(steps, torch.where(torch.arange(steps) == k, sigmas, 0.0)) for k in range(steps)]
    assert all(each == pytest.approx(TARGET_MEAN, abs=1e-6) for each, _ in drawn)
    assert math.sqrt(sum(each for _, each in drawn) / steps) == pytest.approx(one, abs=2e-3)
    if every is not None:
        assert math.sqrt(moments(steps, sigmas)[1]) == pytest.approx(every, abs=2e-3)


def test_flow_sde_rejects_a_single_step() -> None:
    with refused("too_few_denoising_steps", 1, "policy.num_inference_steps"):
        noise_scales(1, 0.5)
