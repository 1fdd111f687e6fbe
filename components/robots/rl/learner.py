"""Policy-gradient learner of a robot policy: objectives with probability ratios, such as PPO, on action chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from armature.components.robots.policies.model import PolicyModel
from armature.components.robots.rl.chunk_learner import (
    ANSWERS,
    OF_ANSWERS,
    PADDING,
    RATIOS,
    SLOTS,
    ActionChunkLearner,
    Update,
)
from armature.components.robots.rl.likelihood import ActionLikelihood
from armature.components.robots.rl.loader import ActionChunkBatch, Load, loaded_ahead
from armature.components.robots.rl.settings import GAE, RobotRLTrainerSettings
from armature.components.robots.rl.table import ActionChunkSample
from armature.components.training.ranks import Ranks
from armature.components.vlm.objectives import MAX_LOG_RATIO, OBJECTIVES, Tokens

# --- Loss of the value head ---


def value_loss(values: Tensor, before: Tensor, targets: Tensor, settings: GAE) -> tuple[Tensor, Tensor]:
    """Return two tensors of shape (E,): the clipped value loss of each chunk, and a bool that is True where the clipped
    term is the larger one.

    The loss is max(huber(V - R), huber(V_clip - R)) with V_clip = V_old + clip(V - V_old, -value_clip, value_clip).
    huber(e) is e² / 2 where |e| <= d = huber_delta, else d (|e| - d / 2). With `value_clip` 0 the loss is huber(V - R).
    Source of the clip: the PPO of OpenAI's baselines.

    Args:
        values: V, the predicted values with their gradient, (E,).
        before: V_old, the values predicted during the rollout, (E,).
        targets: R, the values to learn, (E,).

    Example:
        >>> settings = GAE(name="gae", value_clip=0.0)
        >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([3.0]), settings)
        (tensor([2.]), tensor([False]))
    """

    def huber(predicted: Tensor) -> Tensor:
        return huber_loss(predicted, targets, reduction="none", delta=settings.huber_delta)

    plain = huber(values)
    if not settings.value_clip:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = huber(values.clamp(before - settings.value_clip, before + settings.value_clip))
    return torch.maximum(plain, clipped), clipped > plain


class RobotRLLearner(ActionChunkLearner):
    """Learner for objectives that have probability ratios; see `ActionChunkLearner`.

    Args:
        likelihood: computes log-probs of action chunks, matching how they were sampled.
    """

    def __init__(
        self,
        model: PolicyModel,
        settings: RobotRLTrainerSettings,
        likelihood: ActionLikelihood,
        load: Load,
        ranks: Ranks | None = None,
        shard: Callable[[PolicyModel], None] | None = None,
    ) -> None:
        self.likelihood, self._chunks = likelihood, settings.ratio == "chunk"
        if isinstance(settings.advantage, GAE) and shard is None:
            model.add_value_head(settings.seed, likelihood.of_tokens)
        super().__init__(model, settings, load, ranks, shard)
        expert = self.model.action_expert  # these are the initial weights, because no checkpoint is loaded yet
        self._start = [copy.deepcopy(expert).requires_grad_(False)] if settings.kl_coefficient else []

    def score(self, samples: Sequence[ActionChunkSample]) -> list[float]:
        """Return the log-prob of each sample's chunk, computed as in training.

        It is the sum over the chunk's counted numbers or tokens, see `ActionChunkBatch`. Every rank is called with the
        same samples and computes all of them.
        """
        width = self.settings.micro_batch_size
        scores: list[float] = []
        parts = [samples[start : start + width] for start in range(0, len(samples), width)]
        for loaded in loaded_ahead(self._load, parts):
            scores += self._scores(loaded.to(self.ranks.device))
        return scores

    def _scores(self, part: ActionChunkBatch) -> list[float]:
        """Return the log-prob of each chunk of `part`, in the order in which the samples were passed to the loader.

        The autograd graph is freed when this function returns, before the next part is computed.
        """
        (prediction,) = self.likelihood.predict(self.model, part)
        logprobs = _row_sums(self.likelihood.logprobs(prediction, part), part)
        return logprobs.detach()[part.order.argsort()].tolist()

    def _losses(
        self, samples: Sequence[ActionChunkSample], part: ActionChunkBatch, update: Update
    ) -> tuple[Tensor, dict[str, float]]:
        ratios = self._ratios(update)
        prediction, *start = self.likelihood.predict(self.model, part, self._start)
        logprobs = self._per_ratio(self.likelihood.logprobs(prediction, part), part)
        behavior = self._per_ratio(part.logprobs, part)
        rows = torch.arange(len(part.advantages), device=behavior.device) if self._chunks else part.rows
        tokens = Tokens(logprobs, behavior, behavior, part.advantages[rows], rows, len(part.advantages))
        result = OBJECTIVES[self.settings.objective.name](tokens, self.settings.objective)
        loss = result.loss.sum() / ratios
        difference = (logprobs.detach() - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        values = {
            "importance_ratio": difference.exp(),
            "kl": difference.expm1() - difference,
            "clipped_low_fraction": result.low,
            "clipped_high_fraction": result.high,
        }
        for other in start:
            values["kl/start"] = self._per_ratio(self.likelihood.divergences(prediction, other, part), part)
            loss = loss + self.settings.kl_coefficient * values["kl/start"].sum() / ratios
        if coefficient := self.settings.bc_coefficient:
            good = torch.tensor([each.episode_id in update.solved for each in samples], device=rows.device)
            values["bc/loss"] = -logprobs * good[part.order][rows]
            loss = loss + coefficient * values["bc/loss"].sum() / ratios
        if isinstance(gae := self.settings.advantage, GAE):
            values |= self._value_losses(prediction.states, part, gae)
            loss = loss + gae.value_loss_coef * values["value/loss"].sum() / len(update.samples)
        values[PADDING] = part.batch.padding
        counts = {RATIOS: len(rows), ANSWERS: len(part.advantages), SLOTS: part.batch.padding.numel()}
        sums = {"loss": loss} | {name: each.sum() for name, each in values.items()}
        return loss, counts | {name: float(each.detach()) for name, each in sums.items()}

    def _ratios(self, update: Update) -> int:
        """Return the number of probability ratios of an update, on all ranks together."""
        samples = update.samples
        return len(samples) if self._chunks else sum(len(each.logprobs) for each in samples)

    def _too_far(self, kl: float, update: Update) -> bool:
        """Return True if the mean KL divergence of the update's chunks from the rollout policy exceeds `target_kl`."""
        most = self.settings.target_kl
        return bool(most) and self.ranks.sum({"kl": kl})["kl"] > most * self._ratios(update)

    def _per_ratio(self, values: Tensor, part: ActionChunkBatch) -> Tensor:
        """Return one value for each probability ratio, from the `values` (N,) of the counted numbers.

        If a chunk has one ratio, this is the sum over its counted numbers, (E,). If each number has its own ratio, the
        values are returned unchanged.
        """
        return _row_sums(values, part) if self._chunks else values

    def _value_losses(self, states: Tensor, part: ActionChunkBatch, settings: GAE) -> dict[str, Tensor]:
        """Return two values for each chunk, (E,), by metric name: the value head's loss, and whether the loss was
        clipped."""
        assert self.model.value_head is not None and part.values is not None and part.value_targets is not None
        losses = value_loss(self.model.value_head(states), part.values, part.value_targets, settings)
        return dict(zip(OF_ANSWERS, losses, strict=True))


def _row_sums(values: Tensor, part: ActionChunkBatch) -> Tensor:
    """Return, for each chunk, the sum of `values` over its counted numbers: (N,) becomes (E,)."""
    return values.new_zeros(len(part.advantages)).index_add(0, part.rows, values)
