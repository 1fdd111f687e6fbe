"""Times, draws, points and errors of flow matching."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from armature.components.policies.molmoact2.modeling.flow import FlowSamples, flow_errors, flow_times, noisy_actions
from tests.policies.molmoact2.examples import CONFIG, DIMENSIONS, HORIZON


@pytest.mark.parametrize("cutoff", [1.0, 0.6])
def test_times_follow_the_shifted_beta_distribution(cutoff: float) -> None:
    config = CONFIG.model_copy(update={"flow_matching_cutoff": cutoff})
    times = flow_times((20_000,), config, torch.Generator().manual_seed(0)).numpy()
    spread = min(cutoff, 1.0) - 0.001
    assert times.dtype == np.float32
    assert times.min() >= 0.001 - 1e-6
    assert times.max() <= 0.001 + spread + 1e-6
    assert stats.kstest((times - 0.001) / spread, stats.beta(1.0, 1.5).cdf).pvalue > 0.01


def test_draws_are_all_times_first_and_then_all_noise() -> None:
    draws = FlowSamples.draw(3, 2, HORIZON, CONFIG, torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    assert torch.equal(draws.times, flow_times((3, 2), CONFIG, generator))
    assert torch.equal(draws.noise, torch.randn(3, 2, HORIZON, DIMENSIONS, generator=generator))


def test_the_draws_of_an_example_depend_on_its_seed_alone() -> None:
    many = FlowSamples.per_example([9, 1, 5], 2, HORIZON, CONFIG)
    one = FlowSamples.per_example([1], 2, HORIZON, CONFIG)
    assert torch.equal(many.times[1:2], one.times)
    assert torch.equal(many.noise[1:2], one.noise)
    assert len(many.times.unique()) == 6


def test_points_lie_between_noise_and_actions() -> None:
    actions = torch.randn(1, HORIZON, DIMENSIONS)
    noise = torch.randn(1, 3, HORIZON, DIMENSIONS)
    points, target = noisy_actions(actions, FlowSamples(torch.tensor([[0.0, 0.25, 1.0]]), noise), None)
    torch.testing.assert_close(points[0, 0], noise[0, 0])
    torch.testing.assert_close(points[0, 1], 0.75 * noise[0, 1] + 0.25 * actions[0])
    torch.testing.assert_close(points[0, 2], actions[0])
    torch.testing.assert_close(target[0, 1], actions[0] - noise[0, 1])


def test_dimensions_that_a_robot_lacks_are_neither_noise_nor_error() -> None:
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


def test_half_a_chunk_of_padding_halves_the_error() -> None:
    target = torch.zeros(1, 2, 4, DIMENSIONS)
    valid = torch.tensor([[True, True, False, False]])
    torch.testing.assert_close(flow_errors(target + 1.0, target, valid, None), torch.tensor([0.5]))
