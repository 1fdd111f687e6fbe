"""Objectives compared with their formulas, written out token by token in float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.vlm.objectives import Loss, Tokens, kl_estimate, loss_of, normalizer
from armature.components.vlm.settings import TrainerSettings
from tests.refusals import refused

from .conftest import trainer_settings

MASK = {"name": "mask_ratio", "mask_ratio_low": 0.5, "mask_ratio_high": 2.0}
PPO = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}
GSPO = {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15}
CISPO = {"name": "cispo", "clip_high": 0.5}
ALL = [MASK, PPO, GSPO, CISPO]
ROWS = np.array([0, 0, 0, 1, 1, 3, 3, 3, 3])  # row 2 has no trained tokens
LENGTHS = {0: 3, 1: 2, 3: 4}


def make_tokens(logprobs: Any, behavior: Any, advantages: Any, rows: Any = ROWS) -> Tokens:
    behavior = torch.as_tensor(behavior, dtype=torch.float64)
    return Tokens(
        logprobs=torch.as_tensor(logprobs, dtype=torch.float64).requires_grad_(),
        denominator=behavior,
        behavior=behavior,
        advantages=torch.as_tensor(advantages, dtype=torch.float64),
        rows=torch.as_tensor(rows),
        n_rows=int(max(rows)) + 1 if len(rows) else 1,
    )


def random_tokens(seed: int, spread: float = 0.6) -> Tokens:
    rng = np.random.default_rng(seed)
    behavior = rng.normal(-2, 1, len(ROWS))
    advantages = rng.normal(size=4)[ROWS]
    return make_tokens(behavior + rng.normal(0, spread, len(ROWS)), behavior, advantages)


def run(tokens: Tokens, values: TrainerSettings, reference: torch.Tensor | None = None) -> Loss:
    entropy = torch.ones_like(tokens.logprobs.detach())
    return loss_of(tokens, entropy, reference, tokens.logprobs.detach(), values)


def numpy_loss(objective: dict[str, Any], lp: Any, b: Any, adv: Any, aggregation: str) -> tuple[float, Any]:
    """Compute in NumPy the loss of an objective and its gradient with respect to the log-probs `lp`."""
    loss, grad = np.zeros(len(lp)), np.zeros((len(lp), len(lp)))
    for t, row in enumerate(ROWS):
        same = row == ROWS
        r, a = np.exp(lp[t] - b[t]), adv[t]
        if objective["name"] == "mask_ratio":
            if objective["mask_ratio_low"] <= r <= objective["mask_ratio_high"]:
                loss[t], grad[t, t] = -r * a, -r * a
            continue
        if objective["name"] == "cispo":
            w = min(r, 1 + objective["clip_high"])
            loss[t], grad[t, t] = -w * a * lp[t], -w * a
            continue
        low, high = 1 - objective["clip_low"], 1 + objective["clip_high"]
        if objective["name"] == "gspo":
            r = np.exp((lp - b)[same].mean())
        clipped = min(max(r, low), high)
        loss[t] = -min(r * a, clipped * a)
        if r * a <= clipped * a:
            grad[t, same if objective["name"] == "gspo" else t] = (
                -r * a / (same.sum() if objective["name"] == "gspo" else 1)
            )
    weights = np.array([1 / LENGTHS[row] for row in ROWS]) if aggregation == "sequence" else np.ones(len(lp))
    return float((weights * loss).sum()), weights @ grad


@pytest.mark.parametrize("aggregation", ["sum", "token", "sequence", "dr_grpo"])
@pytest.mark.parametrize("objective", ALL, ids=lambda o: o["name"])
def test_loss_and_gradient_equal_formula(objective, aggregation):
    for seed in range(20):
        tokens = random_tokens(seed)
        loss = run(tokens, trainer_settings(objective=objective, aggregation=aggregation))
        arrays = [tokens.logprobs.detach().numpy(), tokens.behavior.numpy(), tokens.advantages.numpy()]
        expected, gradient = numpy_loss(objective, *arrays, aggregation)
        assert loss.total.item() == pytest.approx(expected, abs=1e-12)
        loss.total.backward()
        np.testing.assert_allclose(tokens.logprobs.grad, gradient, atol=1e-12)


@pytest.mark.parametrize("objective", ALL, ids=lambda o: o["name"])
def test_on_policy_gradient_is_policy_gradient(objective):
    behavior = np.linspace(-3, -0.1, len(ROWS))
    advantages = np.array([0.5, -1.0, 0.0, 2.0])[ROWS]
    tokens = make_tokens(behavior, behavior, advantages)
    run(tokens, trainer_settings(objective=objective)).total.backward()
    np.testing.assert_allclose(tokens.logprobs.grad, -advantages, atol=1e-12)


def test_normalizers():
    counts = {"sum": 1, "token": 9, "sequence": 3, "dr_grpo": 3 * 8}
    assert {name: normalizer(trainer_settings(aggregation=name), 9, 3) for name in counts} == counts
    assert normalizer(trainer_settings(aggregation="token"), 0, 0) == 1.0


@given(st.integers(0, 1000), st.lists(st.booleans(), min_size=4, max_size=4), st.sampled_from(ALL))
@settings(max_examples=60)
def test_losses_of_micro_batches_add_up(seed, side, objective):
    for aggregation in ("sum", "token", "sequence", "dr_grpo"):
        values = trainer_settings(objective=objective, aggregation=aggregation)
        full = random_tokens(seed)
        run(full, values).total.backward()
        gradient, total = np.zeros(len(ROWS)), 0.0
        for chosen in (np.array(side)[ROWS], ~np.array(side)[ROWS]):
            if not chosen.any():
                continue
            arrays = (full.logprobs.detach().numpy(), full.behavior.numpy(), full.advantages.numpy(), ROWS)
            part = make_tokens(*(array[chosen] for array in arrays))
            loss = run(part, values)
            loss.total.backward()
            gradient[chosen] = part.logprobs.grad
            total += loss.total.item()
        np.testing.assert_allclose(gradient, full.logprobs.grad, atol=1e-12)
        assert total == pytest.approx(run(full, values).total.item(), abs=1e-12)


# --- Cases of the published trainer, with batches whose advantages are not all zero ---


def band(low: float, high: float) -> TrainerSettings:
    objective = {"name": "mask_ratio", "mask_ratio_low": low, "mask_ratio_high": high}
    return trainer_settings(objective=objective, aggregation="sum")


def two_rows(ratios: Any, advantages: Any) -> Tokens:
    return make_tokens(np.log(ratios), np.zeros(len(ratios)), advantages, rows=np.arange(len(ratios)))


def test_mask_ratio_drops_outside_band_and_keeps_boundary():
    tokens = two_rows([0.11, 0.5, 1.0, 5.0, 9.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    tokens.behavior.zero_()
    loss = run(tokens, band(tokens.logprobs[1].exp().item(), tokens.logprobs[3].exp().item()))
    assert loss.total.item() == pytest.approx(-(0.5 + 1.0 + 5.0))
    assert (loss.sums["masked_low"].item(), loss.sums["masked_high"].item()) == (1, 1)
    loss.total.backward()
    np.testing.assert_allclose(tokens.logprobs.grad, [0, -0.5, -1.0, -5.0, 0], atol=1e-12)


def test_empty_mask_gives_zero_loss_with_gradient():
    tokens = make_tokens([], [], [], rows=np.array([], dtype=np.int64))
    for objective in ALL:
        loss = run(tokens, trainer_settings(objective=objective))
        loss.total.backward()
        assert loss.total.item() == 0.0
        assert loss.sums["importance_ratio"].item() == 0.0
        assert loss.sums["entropy"].item() == 0.0


@pytest.mark.parametrize("objective", ALL, ids=lambda o: o["name"])
@pytest.mark.parametrize("gap", [200.0, -200.0, float("-inf")])
def test_extreme_ratios_keep_other_gradients_finite(objective, gap):
    tokens = make_tokens([-1.0, -1.0 + gap, -1.0], [-1.0, -1.0, -1.0], [1.0, -1.0, 1.0], rows=np.array([0, 1, 2]))
    loss = run(tokens, trainer_settings(objective=objective))
    loss.total.backward()
    assert torch.isfinite(tokens.logprobs.grad).all()
    assert all(torch.isfinite(value) for value in loss.sums.values())
    assert loss.sums["ratio_out_of_range"].item() == 1
    np.testing.assert_allclose(tokens.logprobs.grad[[0, 2]], [-1.0, -1.0])


def test_mismatch_metrics_equal_published_trainer():
    tokens = random_tokens(3)
    sums = run(tokens, trainer_settings()).sums
    ratio = np.exp((tokens.logprobs - tokens.behavior).detach().numpy())
    assert sums["importance_ratio"].item() == pytest.approx(ratio.sum())
    assert sums["mismatch_kl"].item() == pytest.approx((ratio - np.log(ratio) - 1).sum())


# --- Importance correction and the KL term ---


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([-1e4, -3.0, -0.8, -0.1, 0.0, 0.1, 0.8, 3.0, 1e4]), min_size=9, max_size=9),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from([0.0, 0.5]),
)
def test_importance_weight_bounds_equal_icepop(gaps, mode, level, alpha):
    """IcePop (arXiv:2510.18855) uses k(w) = w if alpha <= w <= beta, else 0, token by token."""
    beta = 5.0
    tokens = make_tokens(np.full(9, -1.0), np.full(9, -1.0), np.ones(9))
    together = gaps if level == "token" else [sum(np.array(gaps)[row == ROWS]) for row in ROWS]
    exact = [np.exp(np.clip(gap, -20, 20)) for gap in together]
    expected = [weight if alpha <= weight <= beta else 0.0 for weight in exact]
    if mode == "truncate":
        expected = [min(max(weight, alpha), beta) for weight in exact]
    values = trainer_settings(correction={"mode": mode, "level": level, "floor": alpha, "cap": beta})
    loss = loss_of(tokens, torch.ones(9), None, tokens.behavior + torch.tensor(gaps, dtype=torch.float64), values)
    loss.total.backward()
    np.testing.assert_allclose(tokens.logprobs.grad, -np.array(expected), rtol=1e-9)
    assert loss.sums["weight"].item() == pytest.approx(sum(expected))
    assert loss.sums["weight_floored"].item() == sum(weight < alpha for weight in exact)
    assert loss.sums["weight_capped"].item() == sum(weight > beta for weight in exact)


@pytest.mark.parametrize(
    ("contradiction", "code", "key"),
    [
        ({"correction": {"mode": "mask", "floor": 3.0, "cap": 2.0}}, "value_error", "floor"),
        ({"kl_coefficient": 0.0, "kl_estimator": "k1"}, "without_effect", "kl_estimator"),
        ({"objective": MASK, "correction": {"mode": "truncate", "cap": 2.0}}, "corrected_twice", "correction.mode"),
        ({"weights": "bfloat16", "autocast": "bf16"}, "without_effect", "autocast"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejects_contradicting_settings(contradiction, code, key):
    with refused(code, key):
        trainer_settings(**contradiction)


@settings(max_examples=40)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20))
def test_kl_estimates_equal_schulman_formulas(gaps):
    """With r = reference / policy they are -log r, (log r)^2 / 2 and r - 1 - log r; log r is clamped to ±20."""
    clamped = np.clip(gaps, -20, 20)
    expected = {"k1": -clamped, "k2": clamped**2 / 2, "k3": np.exp(clamped) - 1 - clamped}
    gradients = {"k1": 1.0, "k2": -clamped, "k3": 1 - np.exp(clamped)}
    inside = np.abs(gaps) <= 20
    for name, values in expected.items():
        logprobs = torch.full((len(gaps),), -1.0, dtype=torch.float64, requires_grad=True)
        reference = -1.0 + torch.tensor(gaps, dtype=torch.float64)
        estimate = kl_estimate(logprobs, reference, name)
        np.testing.assert_allclose(estimate.detach(), values, rtol=1e-9, atol=1e-12)
        estimate.sum().backward()
        near = np.isclose(np.abs(gaps), 20)
        wanted = np.where(inside, gradients[name], 0.0)
        np.testing.assert_allclose(np.asarray(logprobs.grad)[~near], wanted[~near], rtol=1e-9, atol=1e-9)


def test_k3_of_small_difference_is_accurate_in_fp32():
    reference = torch.tensor([1e-3, 1e-4, -1e-4])
    estimate = kl_estimate(torch.zeros(3), reference, "k3")
    np.testing.assert_allclose(estimate, reference.double() ** 2 / 2, rtol=1e-2)


@pytest.mark.parametrize(("estimator", "factor"), [("k1", 0.0), ("k2", 1.0)])
def test_expected_gradient_of_kl_estimators(estimator, factor):
    """The mean gradient over sampled tokens is the gradient of KL(policy || reference) for k2, and 0 for k1."""
    rng = np.random.default_rng(5)
    logits = torch.tensor(rng.normal(size=7), requires_grad=True)
    reference = torch.tensor(rng.normal(size=7)).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    estimate = kl_estimate(logprobs, reference, estimator)
    (expected,) = torch.autograd.grad((logprobs.detach().exp() * estimate).sum(), logits)
    torch.testing.assert_close(expected, factor * exact)


@settings(max_examples=40)
@given(
    st.sampled_from(ALL),
    st.sampled_from(["k1", "k2", "k3"]),
    st.sampled_from([None, "truncate", "mask"]),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=9, max_size=9),
    st.lists(st.floats(-1e4, 0, width=32), min_size=9, max_size=9),
)
def test_any_log_ratio_gives_finite_loss_and_gradient(objective, estimator, mode, gaps, reference):
    """The numbers are fp32, as in a trainer. Beyond a log-ratio of 20 a token's ratio has no gradient."""
    correction = {"correction": {"mode": mode}} if mode and objective is not MASK else {}
    behavior = torch.full((9,), -1.0)
    logprobs = (behavior + torch.tensor(gaps)).requires_grad_()
    advantages, rows = torch.tensor([0.5, -1.0, 0.0, 2.0])[torch.as_tensor(ROWS)], torch.as_tensor(ROWS)
    tokens = Tokens(logprobs, behavior, behavior, advantages, rows, 4)
    values = trainer_settings(objective=objective, kl_coefficient=0.1, kl_estimator=estimator, **correction)
    loss = run(tokens, values, torch.tensor(reference))
    loss.total.backward()
    assert torch.isfinite(loss.total) and logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) for value in loss.sums.values())
    if objective in (MASK, PPO):
        alone = make_tokens(logprobs.detach(), behavior, advantages)
        run(alone, trainer_settings(objective=objective)).total.backward()
        assert alone.logprobs.grad is not None and not alone.logprobs.grad[np.abs(gaps) > 20.001].any()


def test_kl_term_pulls_toward_reference():
    tokens = make_tokens([-1.0, -2.0], [-1.0, -2.0], [0.0, 0.0], rows=np.array([0, 1]))
    reference = torch.tensor([-0.5, -2.5], dtype=torch.float64)
    loss = run(tokens, trainer_settings(kl_coefficient=0.1), reference)
    loss.total.backward()
    np.testing.assert_allclose(tokens.logprobs.grad, 0.1 * (1 - np.exp([0.5, -0.5])))


def test_likelihood_equals_cross_entropy():
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(len(ROWS), 11))).requires_grad_()
    targets = torch.arange(len(ROWS)) % 11
    logprobs = logits.log_softmax(-1)[torch.arange(len(ROWS)), targets]
    behavior = torch.zeros(len(ROWS), dtype=torch.float64)
    tokens = Tokens(logprobs, behavior, behavior, torch.zeros_like(behavior), torch.as_tensor(ROWS), 4)
    values = trainer_settings(objective={"name": "likelihood"}, aggregation="token")
    loss = run(tokens, values).total / normalizer(values, len(ROWS), 3)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    assert loss.item() == pytest.approx(expected.item())
    (ours,), (theirs,) = torch.autograd.grad(loss, logits, retain_graph=True), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(ours, theirs)


def test_dual_clip_bounds_loss_of_negative_advantages():
    """The ratios are 5, 5, 2 and 0.5, the advantages -1, 1, -1 and -1, and the bound is 3."""
    tokens = make_tokens(np.log([5.0, 5.0, 2.0, 0.5]), np.zeros(4), [-1.0, 1.0, -1.0, -1.0], np.arange(4))
    values = trainer_settings(objective={**PPO, "dual_clip": 3.0}, aggregation="sum")
    loss = run(tokens, values)
    assert loss.total.item() == pytest.approx(3.0 - 1.28 + 2.0 + 0.8)
    loss.total.backward()
    np.testing.assert_allclose(tokens.logprobs.grad, [0.0, 0.0, 2.0, 0.0], atol=1e-12)


def test_entropy_term_rewards_entropy():
    tokens = random_tokens(0)
    values = trainer_settings(objective=PPO, entropy_coefficient=0.5, aggregation="sum")
    entropy = torch.full_like(tokens.logprobs.detach(), 2.0).requires_grad_()
    loss = loss_of(tokens, entropy, None, tokens.logprobs.detach(), values)
    plain = run(tokens, trainer_settings(objective=PPO, aggregation="sum"))
    assert loss.total.item() == pytest.approx(plain.total.item() - 0.5 * 2.0 * len(ROWS))
    loss.total.backward()
    assert entropy.grad is not None and torch.equal(entropy.grad, torch.full_like(entropy, -0.5))
