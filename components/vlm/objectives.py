"""Objectives of policy optimization as losses per token, the importance correction, the KL term, and their sum.

Symbols in docstrings: lp is the log-prob of a sampled token under the trained policy, with gradient; b is its log-prob
under the policy in the ratio's denominator; r = exp(lp - b) is the ratio; A is the advantage; t runs over trained
tokens, i over sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

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
"""Log-ratios are clamped to ±20, so that exp stays finite and a single token cannot dominate a mean."""


@dataclass(frozen=True)
class Tokens:
    """The N trained tokens of a micro-batch, row after row without padding.

    Example:
        >>> one, zero = torch.ones(3), torch.zeros(3)
        >>> tokens = Tokens(zero, zero, zero, advantages=one, rows=torch.tensor([0, 0, 1]), n_rows=2)
        >>> tokens.lengths
        tensor([2, 1])
    """

    logprobs: Tensor
    """Log-probs (N,) under the trained policy, with gradient."""
    denominator: Tensor
    """Log-probs (N,) of the tokens that are the denominator of the objective's ratio."""
    behavior: Tensor
    """Log-probs (N,) that the sampler reported for the tokens."""
    advantages: Tensor
    """Advantages (N,)."""
    rows: Tensor
    """Number (N,) of the sequence to which each token belongs, int64, ascending."""
    n_rows: int
    """Number of sequences."""

    @property
    def lengths(self) -> Tensor:
        """Number of trained tokens of each sequence, (n_rows,)."""
        return self.row_sums(torch.ones_like(self.rows))

    def row_sums(self, values: Tensor) -> Tensor:
        """Return the sums (n_rows,) of `values` (N,) over the tokens of each sequence."""
        return values.new_zeros(self.n_rows).index_add(0, self.rows, values)


@dataclass(frozen=True)
class PerToken:
    """The result of an objective for N tokens."""

    loss: Tensor
    """Loss (N,) of each token."""
    low: Tensor
    """Tokens (N,), bool, that the objective dropped or clipped because their ratio is too small."""
    high: Tensor
    """Tokens (N,), bool, that the objective dropped or clipped because their ratio is too large."""


Objective = Callable[[Tokens, Any], PerToken]


def log_ratio(logprobs: Tensor, denominator: Tensor) -> Tensor:
    """Return lp - b clamped to ±MAX_LOG_RATIO; beyond it the gradient is zero."""
    return (logprobs - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mask_ratio(tokens: Tokens, settings: MaskRatio) -> PerToken:
    """Return loss_t = -r_t A_t if low <= r_t <= high, else 0; r is not detached.

    The gradient is -r A grad(lp). Source: the trainer of verifiers 0.1.7 and its multimodal sibling.
    """
    clamped = log_ratio(tokens.logprobs, tokens.denominator)
    ratio = clamped.detach().exp()
    low, high = ratio < settings.mask_ratio_low, ratio > settings.mask_ratio_high
    inside = ~(low | high)
    loss = -torch.where(inside, clamped, 0.0).exp() * tokens.advantages * inside
    return PerToken(loss, low, high)


def ppo(tokens: Tokens, settings: PPO) -> PerToken:
    """Return loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t).

    Source: Schulman et al. 2017 (arXiv:1707.06347); the asymmetric clip is from DAPO (Yu et al. 2025,
    arXiv:2503.14476). With `dual_clip` c the loss is at most c |A_t| if A_t < 0 (Ye et al. 2020, arXiv:1912.09729).
    """
    ratio = log_ratio(tokens.logprobs, tokens.denominator).exp()
    result = _clipped(ratio, tokens.advantages, settings.clip_low, settings.clip_high)
    if settings.dual_clip is None:
        return result
    bounded = torch.minimum(result.loss, settings.dual_clip * tokens.advantages.abs())
    return replace(result, loss=torch.where(tokens.advantages < 0, bounded, result.loss))


def gspo(tokens: Tokens, settings: GSPO) -> PerToken:
    """Return loss_t = -min(s_i A_t, clip(s_i, 1 - clip_low, 1 + clip_high) A_t), s_i = exp(mean over i of (lp - b)).

    Source: Zheng et al. 2025 (arXiv:2507.18071). With aggregation "sequence" and one advantage per sequence this is the
    paper's loss.
    """
    lengths = tokens.lengths.clamp(min=1)
    mean = tokens.row_sums(tokens.logprobs - tokens.denominator) / lengths
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[tokens.rows]
    return _clipped(ratio, tokens.advantages, settings.clip_low, settings.clip_high)


def cispo(tokens: Tokens, settings: CISPO) -> PerToken:
    """Return loss_t = -stop_gradient(min(r_t, 1 + clip_high)) A_t lp_t.

    Source: MiniMax 2025 (arXiv:2506.13585), with the upper clip only, as in the paper's experiments.
    """
    ratio = log_ratio(tokens.logprobs.detach(), tokens.denominator).exp()
    high = ratio > 1 + settings.clip_high
    weight = ratio.clamp(max=1 + settings.clip_high)
    # A token of probability 0 has log-prob -inf, which would make the loss NaN; it has no useful gradient.
    logprobs = tokens.logprobs.clamp(min=-1e4)
    return PerToken(-weight * tokens.advantages * logprobs, torch.zeros_like(high), high)


def likelihood(tokens: Tokens, settings: Likelihood) -> PerToken:
    """Return loss_t = -lp_t, the cross-entropy of the trained tokens, whatever their advantages and ratios."""
    nothing = torch.zeros_like(tokens.logprobs, dtype=torch.bool)
    return PerToken(-tokens.logprobs, nothing, nothing)


def function(tokens: Tokens, settings: FunctionObjective) -> PerToken:
    """Return loss_t as computed by the user's function that `settings.function` names.

    Raises:
        ConfigurationError: the function does not exist, or does not return one loss per token.
    """
    loss = load_object(settings.function, "objective")(tokens, **settings.args)
    if not isinstance(loss, Tensor) or loss.shape != tokens.logprobs.shape:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigurationError(
            f"the objective returned {shape} instead of one loss per trained token, {tuple(tokens.logprobs.shape)}",
            code="objective_loss_shape",
            where=settings.function,
            remedy="return a tensor of the shape of tokens.logprobs; the trainer computes its mean or sum",
        )
    nothing = torch.zeros_like(loss, dtype=torch.bool)
    return PerToken(loss, nothing, nothing)


class PairLoss:
    """The loss of direct preference optimization, for pairs of a chosen and a rejected answer.

    Rows 2k and 2k + 1 are a pair, whose tokens have the advantage 1 or -1, and b is the log-prob under the initial
    model. Each token has the loss of its pair, -log sigmoid(beta m) with m the sum of A_t (lp_t - b_t) over both rows,
    so that with aggregation "sequence" the loss is the mean over pairs. Source: equation 7 of Rafailov et al. 2023
    (arXiv:2305.18290).
    """

    together = 2

    def __call__(self, tokens: Tokens, *, beta: float) -> Tensor:
        pairs = tokens.rows // 2
        terms = tokens.advantages * (tokens.logprobs - tokens.behavior)
        margins = terms.new_zeros((tokens.n_rows + 1) // 2).index_add(0, pairs, terms)
        return softplus(-beta * margins)[pairs]


dpo = PairLoss()


def together(settings: TrainerSettings) -> int:
    """Return the number of consecutive samples that the objective compares, which share a forward pass.

    It is the attribute `together` of a function, such as 2 for a loss of pairs, and 1 for any other objective.
    """
    if not isinstance(settings.objective, FunctionObjective):
        return 1
    return getattr(load_object(settings.objective.function, "objective"), "together", 1)


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
    """Return estimates (N,) of KL(policy || reference).

    With d = reference - lp they are k1 = -d, k2 = d^2 / 2 and k3 = exp(d) - 1 - d (Schulman, "Approximating KL
    divergence", 2020). k1 and k3 are unbiased, and k3 is never negative. If tokens are sampled from the policy, only k2
    has an unbiased gradient; the gradient of k1 is 0 on average.

    Example:
        >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), "k2")
        tensor([0.5000])
    """
    difference = log_ratio(reference, logprobs)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return difference.expm1() - difference


def importance_weights(tokens: Tokens, start: Tensor, settings: ImportanceCorrection) -> tuple[Tensor, Tensor, Tensor]:
    """Return importance weights w = exp(start - behavior), truncated to, or set to 0 outside of, [floor, cap].

    At level "sequence" all tokens of a sequence have the product of its tokens' weights.

    Args:
        start: log-probs (N,) of the policy at the start of the step.

    Returns:
        Three tensors (N,) without gradient: the weights, and bool masks of those below the floor and above the cap.
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
    """Return the sum over tokens, or with aggregation "sequence" the sum of the sequences' means; a scalar.

    Divided by the `normalizer` of the update, sums over micro-batches are exactly the loss of the update, because a
    sequence is never split between micro-batches.
    """
    if settings.aggregation == "sequence":
        return (loss / tokens.lengths.clamp(min=1)[tokens.rows]).sum()
    return loss.sum()


def normalizer(settings: TrainerSettings, n_tokens: int, n_sequences: int) -> float:
    """Return the divisor (at least 1) of the losses summed over all micro-batches and ranks of one update."""
    divisors = {
        "sum": 1,
        "token": n_tokens,
        "sequence": n_sequences,
        "dr_grpo": n_sequences * (settings.dr_grpo_length or 1),
    }
    return float(max(divisors[settings.aggregation], 1))


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch and the sums behind its metrics."""

    total: Tensor
    """Scalar with gradient, not yet divided by the `normalizer`."""
    sums: dict[str, Tensor]
    """Sums over the trained tokens by name, float64 scalars, to be added over micro-batches."""


def loss_of(
    tokens: Tokens,
    entropy: Tensor,
    reference: Tensor | None,
    start: Tensor,
    settings: TrainerSettings,
    distance: Tensor | None = None,
) -> Loss:
    """Return the loss of one micro-batch: the objective, times importance weights, plus KL and minus entropy terms,
    plus the distance to a teacher.

    Args:
        tokens: the trained tokens.
        entropy: entropies (N,) of the policy's distributions.
        reference: log-probs (N,) under the initial model; None without a KL term.
        start: log-probs (N,) of the policy at the start of the step; only the importance correction uses them.
        settings: the objective and its options.
        distance: weighted distance (N,) to the teacher, with gradient; None without a teacher or if advantages have it.
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
    if distance is not None:
        loss = loss + distance
        sums["teacher"] = distance
    sums |= _mismatch(tokens) | {"entropy": entropy, "advantage_abs": tokens.advantages.abs()}
    totals = {name: values.detach().double().sum() for name, values in sums.items()}
    return Loss(aggregate(loss, tokens, settings), totals)


def _mismatch(tokens: Tokens) -> dict[str, Tensor]:
    """Return two metrics (N,) by name: the ratio to the sampler and the k3 estimate of KL(sampler || policy)."""
    raw = (tokens.logprobs - tokens.behavior).detach()
    difference = log_ratio(tokens.logprobs.detach(), tokens.behavior).double()
    return {
        "importance_ratio": difference.exp(),
        "mismatch_kl": difference.expm1() - difference,
        "ratio_out_of_range": ~(raw.abs() <= MAX_LOG_RATIO),
    }
