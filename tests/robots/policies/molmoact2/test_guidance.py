"""Real-time chunking, compared with its formula with a numeric Jacobian, and its effect on a policy's chunks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from armature.components.contracts.robots import PreviousActions
from armature.components.robots.policies.flow import guided_velocity, prefix_weights
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from tests.refusals import refused
from tests.robots.policies.molmoact2 import released
from tests.robots.rl.kitchen import calm_policy

ROWS, STEPS, SIZE = 2, 5, 3


def test_prefix_weights_equal_the_paper() -> None:
    delay, left, horizon = 2, 6, 9
    for step, actual in enumerate(prefix_weights(delay, left, horizon).tolist()):
        falling = (left - step) / (left - delay + 1)
        soft = falling * (math.exp(falling) - 1) / (math.e - 1)
        assert actual == pytest.approx(1.0 if step < delay else soft if step < left else 0.0, abs=1e-7)
    assert prefix_weights(3, 3, 5).tolist() == [1, 1, 1, 0, 0]
    assert prefix_weights(0, 5, 5).max() < 1


@pytest.mark.parametrize("time", [0.0, 0.1, 0.5, 0.9])
def test_guided_velocity_equals_the_formula_with_a_numeric_jacobian(time: float) -> None:
    random = torch.Generator().manual_seed(0)
    mixing = torch.randn(STEPS * SIZE, STEPS * SIZE, generator=random, dtype=torch.float64) / 4
    x, wanted = (torch.randn(ROWS, STEPS, SIZE, generator=random, dtype=torch.float64) for _ in range(2))
    weights = torch.stack([prefix_weights(1, 3, STEPS), prefix_weights(2, 5, STEPS)]).double()

    def velocity(x: Tensor) -> Tensor:
        return torch.tanh(x.reshape(len(x), -1) @ mixing).reshape(x.shape)

    actual = guided_velocity(velocity, x, time, wanted, weights)
    assert not actual.requires_grad
    scale = 5.0 if time == 0 else min(5.0, (1 - time) / time / ((1 - time) ** 2 / (time**2 + (1 - time) ** 2)))
    for row in range(ROWS):

        def estimate(flat: Tensor) -> Tensor:
            one = flat.reshape(1, STEPS, SIZE)
            return (one + (1 - time) * velocity(one)).flatten()

        flat = x[row].flatten()
        jacobian = torch.stack([_slope(estimate, flat, each) for each in range(len(flat))], dim=1)
        pull = (wanted[row].flatten() - estimate(flat)) * weights[row].repeat_interleave(SIZE) @ jacobian
        expected = velocity(x[row : row + 1]).flatten() + scale * pull
        torch.testing.assert_close(actual[row].flatten(), expected, rtol=1e-6, atol=1e-7)


def _slope(function: object, at: Tensor, index: int, width: float = 1e-5) -> Tensor:
    """Return the derivative along dimension `index` by central differences."""
    assert callable(function)
    moved = torch.zeros_like(at)
    moved[index] = width
    slope: Tensor = (function(at + moved) - function(at - moved)) / (2 * width)
    return slope


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> MolmoAct2Policy:
    loaded = calm_policy(Path(tmp_path_factory.mktemp("calm")))
    settings = loaded.settings.model_copy(update={"n_action_steps": 4, "num_inference_steps": 10})
    return MolmoAct2Policy(loaded.model, loaded.processor(), settings, "continuous", rows=4)


def middle(shift: float, steps: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return actions that differ from the middle of each dimension's range by `shift` times half the range."""
    stats = released.norm_stats()["metadata_by_tag"]["kitchen"]["action_stats"]
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    return np.tile((low + high) / 2 + shift * (high - low) / 2, (steps, 1)).astype(np.float32)


def test_guidance_keeps_executed_steps_and_leaves_later_ones_free(policy: MolmoAct2Policy) -> None:
    wanted = middle(0.5, 3)
    free = np.stack([policy.predict([released.observe(number)], [number])[0] for number in range(6)])
    pulled = np.stack(
        [policy.predict([released.observe(number, PreviousActions(wanted, 2))], [number])[0] for number in range(6)]
    )
    before, after = (np.abs(chunks[:, :3] - wanted).mean((0, 2)) for chunks in (free, pulled))
    assert (after[:2] < 0.1 * before[:2]).all() and after[2] < before[2], (before, after)
    assert np.abs(pulled[:, 3] - wanted[0]).mean() > 2 * after[:2].max()


def test_rows_are_independent_with_and_without_previous_actions(policy: MolmoAct2Policy) -> None:
    left = [None, PreviousActions(middle(0.5, 3), 1), None, PreviousActions(middle(-0.4, 4), 2)]
    seen = [released.observe(number, previous) for number, previous in enumerate(left)]
    together = policy.predict(seen, [7, 8, 9, 10])
    for row, (observation, seed) in enumerate(zip(seen, (7, 8, 9, 10), strict=True)):
        assert policy.predict([observation], [seed])[0].tobytes() == together[row].tobytes()
    assert policy.predict([replace(seen[1], previous=None)], [8])[0].tobytes() != together[1].tobytes()


def test_guidance_with_zero_weights_changes_nothing(policy: MolmoAct2Policy) -> None:
    sampler, examples = policy._sampler, [policy._processor.encode(released.observe(1))]
    plain = sampler.sample(examples, [3])
    extended = sampler.sample_guided(examples, [3], torch.ones_like(plain), torch.zeros(plain.shape[:2]))
    torch.testing.assert_close(extended, plain, rtol=1e-5, atol=1e-5)


def test_rejects_previous_actions_of_another_robot(policy: MolmoAct2Policy) -> None:
    with refused("dimensions_mismatch", (2, 3), "previous actions"):
        policy.predict([released.observe(0, PreviousActions(np.zeros((2, 3), np.float32), 1))], [0])
