"""The objectives of policy optimization, as losses per token, and their sums over a micro-batch.

Symbols: lp = log-prob of a sampled token under the policy that is trained (with gradient); b = under the policy
in the ratio's denominator; r = exp(lp - b); A = advantage; t runs over the trained tokens, i over sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError
from armature.components.machine.project import load_object
from armature.components.machine.registry import Registry
from armature.components.vlm.settings import (
    CISPO,
    GSPO,
    PPO,
    FunctionObjective,
    ImportanceCorrection,
    KLEstimator,
    Likelihood,
    MaskRatio,
    TrainerSettings,
)

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within ±20, so that exp stays finite and one token cannot poison a mean."""


@dataclass(frozen=True)
class Tokens:
    """The N trained tokens of a micro-batch, packed: every tensor is (N,).

    `logprobs` has the gradient; `denominator` is what the objective's ratio is against; `behavior` is the
    sampler's; `rows` (int64) tells which of the `n_rows` sequences a token belongs to, ascending.
    """

    logprobs: Tensor
    denominator: Tensor
    behavior: Tensor
    advantages: Tensor
    rows: Tensor
    n_rows: int

    @property
    def lengths(self) -> Tensor:
        """(n_rows,) trained tokens of each sequence."""
        return self.row_sums(torch.ones_like(self.rows))

    def row_sums(self, values: Tensor) -> Tensor:
        """(n_rows,) sums of `values` (N,) over each sequence."""
        return values.new_zeros(self.n_rows).index_add(0, self.rows, values)


@dataclass(frozen=True)
class PerToken:
    """`loss` (N,) and which tokens (bool, (N,)) fell out below and above the objective's band."""

    loss: Tensor
    low: Tensor
    high: Tensor


Objective = Callable[[Tokens, Any], PerToken]


def log_ratio(logprobs: Tensor, denominator: Tensor) -> Tensor:
    """lp - b held within ±MAX_LOG_RATIO; beyond it the gradient is zero."""
    return (logprobs - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mask_ratio(tokens: Tokens, settings: MaskRatio) -> PerToken:
    """loss_t = -r_t A_t where low <= r_t <= high, else 0; r is not detached.

    The gradient is -r A grad(lp). Source: the trainer of verifiers 0.1.7 and its multimodal sibling.
    """
    held = log_ratio(tokens.logprobs, tokens.denominator)
    ratio = held.detach().exp()
    low, high = ratio < settings.mask_ratio_low, ratio > settings.mask_ratio_high
    kept = ~(low | high)
    loss = -torch.where(kept, held, 0.0).exp() * tokens.advantages * kept
    return PerToken(loss, low, high)


def ppo(tokens: Tokens, settings: PPO) -> PerToken:
    """loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t).

    Schulman et al. 2017 (arXiv:1707.06347); the asymmetric clip is DAPO's (Yu et al. 2025, arXiv:2503.14476). With
    `dual_clip` c it is at most c |A_t| where A_t < 0 (Ye et al. 2020, arXiv:1912.09729).
    """
    ratio = log_ratio(tokens.logprobs, tokens.denominator).exp()
    result = _clipped(ratio, tokens.advantages, settings.clip_low, settings.clip_high)
    if settings.dual_clip is None:
        return result
    bounded = torch.minimum(result.loss, settings.dual_clip * tokens.advantages.abs())
    return replace(result, loss=torch.where(tokens.advantages < 0, bounded, result.loss))


def gspo(tokens: Tokens, settings: GSPO) -> PerToken:
    """loss_t = -min(s_i A_t, clip(s_i, 1 - clip_low, 1 + clip_high) A_t), s_i = exp(mean over i of (lp - b)).

    Zheng et al. 2025 (arXiv:2507.18071). With aggregation "sequence" and one advantage per sequence this is
    the paper's loss.
    """
    lengths = tokens.lengths.clamp(min=1)
    mean = tokens.row_sums(tokens.logprobs - tokens.denominator) / lengths
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[tokens.rows]
    return _clipped(ratio, tokens.advantages, settings.clip_low, settings.clip_high)


def cispo(tokens: Tokens, settings: CISPO) -> PerToken:
    """loss_t = -stop_gradient(min(r_t, 1 + clip_high)) A_t lp_t.

    MiniMax 2025 (arXiv:2506.13585), with the upper clip only, as in its experiments.
    """
    ratio = log_ratio(tokens.logprobs.detach(), tokens.denominator).exp()
    high = ratio > 1 + settings.clip_high
    weight = ratio.clamp(max=1 + settings.clip_high)
    # A token of probability zero has no gradient worth having; its -inf would make the loss NaN.
    logprobs = tokens.logprobs.clamp(min=-1e4)
    return PerToken(-weight * tokens.advantages * logprobs, torch.zeros_like(high), high)


def likelihood(tokens: Tokens, settings: Likelihood) -> PerToken:
    """loss_t = -lp_t: the cross-entropy of the given tokens. Advantages and ratios play no part."""
    nothing = torch.zeros_like(tokens.logprobs, dtype=torch.bool)
    return PerToken(-tokens.logprobs, nothing, nothing)


def function(tokens: Tokens, settings: FunctionObjective) -> PerToken:
    """loss_t as a function of the user's gives it.

    Raises:
        ConfigurationError: there is no such function, or it gives no tensor of one loss for each token.
    """
    loss = load_object(settings.function, "objective")(tokens, **settings.args)
    if not isinstance(loss, Tensor) or loss.shape != tokens.logprobs.shape:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigurationError(
            f"an objective gives one loss for each trained token, {tuple(tokens.logprobs.shape)}, not {shape}",
            code="objective_loss_shape",
            where=settings.function,
            remedy="return a tensor like tokens.logprobs; the trainer takes its mean or sum",
        )
    nothing = torch.zeros_like(loss, dtype=torch.bool)
    return PerToken(loss, nothing, nothing)


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PerToken:
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        low = (ratio < 1 - clip_low) & (advantages < 0)
        high = (ratio > 1 + clip_high) & (advantages > 0)
    return PerToken(loss, low, high)


OBJECTIVES = Registry(
    "objective",
    "armature.objectives",
    {
        name: f"armature.components.vlm.objectives:{name}"
        for name in ("mask_ratio", "ppo", "gspo", "cispo", "likelihood", "function")
    },
)


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """(N,) estimates of KL(policy || reference): with d = reference - lp, k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.

    Schulman, "Approximating KL divergence" (2020). k1 and k3 have the right mean, k3 is never negative, and k2 alone
    has the right gradient where tokens are sampled from the policy; that of k1 is 0 on average.
    """
    difference = log_ratio(reference, logprobs)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return difference.expm1() - difference


def importance_weights(tokens: Tokens, start: Tensor, settings: ImportanceCorrection) -> tuple[Tensor, Tensor, Tensor]:
    """Weights w = exp(start - behavior), per token or multiplied over the sequence, cut or zeroed at floor and cap.

    Args:
        start: (N,) log-probs of the policy at the start of the step.

    Returns:
        (N,) each, without gradient: the weights, and which of them (bool) were below the floor and above the cap.
    """
    difference = (start - tokens.behavior).detach()
    if settings.level == "sequence":
        difference = tokens.row_sums(difference)[tokens.rows]
    weights = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = weights < settings.floor, weights > settings.cap
    if settings.mode == "mask":
        return weights * ~(low | high), low, high
    return weights.clamp(settings.floor, settings.cap), low, high


def aggregate(loss: Tensor, tokens: Tokens, settings: TrainerSettings) -> Tensor:
    """Scalar: the sum over tokens, or over the sequences' means. Divide by `normalizer` of the whole update.

    Sums over micro-batches are exact, because a sequence is never split between two.
    """
    if settings.aggregation == "sequence":
        return (loss / tokens.lengths.clamp(min=1)[tokens.rows]).sum()
    return loss.sum()


def normalizer(settings: TrainerSettings, n_tokens: int, n_sequences: int) -> float:
    """What the sum over all micro-batches and ranks of one update is divided by (at least 1)."""
    divisors = {
        "sum": 1,
        "token": n_tokens,
        "sequence": n_sequences,
        "dr_grpo": n_sequences * (settings.dr_grpo_length or 1),
    }
    return float(max(divisors[settings.aggregation], 1))


@dataclass(frozen=True)
class Loss:
    """`total`: scalar with gradient, not yet normalized. `sums`: float64 scalars to add over micro-batches."""

    total: Tensor
    sums: dict[str, Tensor]


def loss_of(
    tokens: Tokens, entropy: Tensor, reference: Tensor | None, start: Tensor, settings: TrainerSettings
) -> Loss:
    """The loss of one micro-batch, and the sums behind its metrics.

    Args:
        tokens: the trained tokens.
        entropy: (N,) of the policy's distribution, with its gradient where there is an entropy term.
        reference: (N,) log-probs under the initial model, where there is a KL term.
        start: (N,) log-probs of the policy at the start of the step; used by the importance correction.
        settings: the objective and its options.
    """
    result = OBJECTIVES[settings.objective.name](tokens, settings.objective)
    loss = result.loss
    sums: dict[str, Tensor] = {"masked_low": result.low, "masked_high": result.high}
    if isinstance(settings.correction, ImportanceCorrection):
        weights, below, above = importance_weights(tokens, start, settings.correction)
        loss = loss * weights
        sums |= {"weight": weights, "weight_floored": below, "weight_capped": above}
    if reference is not None:
        penalty = kl_estimate(tokens.logprobs, reference, settings.kl_estimator)
        loss = loss + settings.kl_coefficient * penalty
        sums["kl_reference"] = penalty
    if settings.entropy_coefficient > 0:
        loss = loss - settings.entropy_coefficient * entropy
    sums |= _mismatch(tokens) | {"entropy": entropy, "advantage_abs": tokens.advantages.abs()}
    totals = {name: values.detach().double().sum() for name, values in sums.items()}
    return Loss(aggregate(loss, tokens, settings), totals)


def _mismatch(tokens: Tokens) -> dict[str, Tensor]:
    """(N,) ratio against the sampler and k3 estimate of KL(sampler || policy), as the first trainer reported them."""
    raw = (tokens.logprobs - tokens.behavior).detach()
    difference = log_ratio(tokens.logprobs.detach(), tokens.behavior).double()
    return {
        "importance_ratio": difference.exp(),
        "mismatch_kl": difference.expm1() - difference,
        "ratio_out_of_range": ~(raw.abs() <= MAX_LOG_RATIO),
    }
