"""Update the weights of a policy from micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import frexp, sqrt
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from armature.components.robots.imitation.data import PolicyMicroBatch
from armature.components.robots.imitation.opening import parameter_groups, place
from armature.components.robots.imitation.settings import VLATrainerSettings
from armature.components.robots.policies.model import LossDenominators, PolicyLosses, PolicyModel
from armature.components.training.engine import AppliedUpdate, TrainingEngine, peak_memory_gib
from armature.components.training.ranks import Ranks

LOSSES = {"loss": "total", "loss/flow": "flow", "loss/cross_entropy": "cross_entropy", "loss/z": "z"}
"""Names of the losses in the history. Each value is the attribute of `PolicyLosses` that holds the loss."""


class PolicyLearner(TrainingEngine[PolicyModel]):
    """A policy with its optimizer.

    Args:
        model: Model whose parameters that require a gradient are trained.
        plan: Losses to compute, from `PolicyFamily.loss_plan`.
        ranks: Ranks that train together; None: this process alone.
        shard: Function that splits a model on the meta device over the ranks and loads each rank's shards; None: each
            rank holds the whole model.
    """

    def __init__(
        self,
        model: PolicyModel,
        settings: VLATrainerSettings,
        plan: Any,
        ranks: Ranks | None = None,
        shard: Callable[[PolicyModel], None] | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.settings, self.plan = settings, plan
        model.checkpoint_gradients(settings.gradient_checkpointing)
        place(model, settings, ranks, shard)
        super().__init__(
            model,
            parameter_groups(model, settings),
            ranks,
            sharded=shard is not None,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            max_grad_norm=settings.max_grad_norm,
            clip_groups=True,
            ema_decay=settings.ema_decay,
        )

    def step(self, micro_batches: Sequence[PolicyMicroBatch]) -> dict[str, float]:
        """Make one update from the micro-batches of all ranks; all ranks call it with equally many.

        The loss is the loss of all examples together, independent of how they are spread over micro-batches and ranks.
        If a gradient is not finite the update is skipped: weights and optimizer do not change, but the step counts.

        Returns:
            Losses, gradient norms, learning rates, padding and speed over all ranks.
        """
        began = perf_counter()
        number = self.steps_done + 1
        self.model.train()
        if self.settings.mode == "expert":
            self.model.vlm.eval()
        micro_batches = self._scaled(micro_batches)
        ready = [micro.to(self.ranks.device) for micro in micro_batches]
        denominators = LossDenominators(**self.ranks.sum(self._denominators(micro_batches)._asdict()))
        parts: list[dict[str, Tensor]] = []
        for index, micro in enumerate(ready):
            torch.manual_seed(self._seed(number, index))
            losses: PolicyLosses = self.model(micro.batch, micro.draws, self.plan, denominators)
            self.backward(losses.total)
            parts.append({name: getattr(losses, attribute).detach() for name, attribute in LOSSES.items()})
        done = self.update(number)
        sums = {name: sum(float(each[name]) for each in parts) for name in LOSSES}
        report = self.ranks.sum(sums) | self._gradients(done, number)
        self.steps_done = number
        return report | self._counts(micro_batches, perf_counter() - began)

    @torch.no_grad()
    def score(self, micro_batches: Iterable[PolicyMicroBatch]) -> dict[str, float]:
        """Return the losses of all examples of `micro_batches` together, computed without dropout.

        All ranks must call this method with the same micro-batches.
        """
        self.model.eval()
        sums = dict.fromkeys(LOSSES, 0.0)
        ready = [micro.to(self.ranks.device) for micro in micro_batches]
        denominators = self._denominators(ready)
        for micro in ready:
            losses = self.model(micro.batch, micro.draws, self.plan, denominators)
            for name, attribute in LOSSES.items():
                sums[name] += float(getattr(losses, attribute))
        return sums

    def _scaled(self, micro_batches: Sequence[PolicyMicroBatch]) -> Sequence[PolicyMicroBatch]:
        """Scale weights by a power of two, so that the largest of the update is between 1/2 and 1.

        Only ratios of weights count, and this keeps their bits, but sums of weights near the limits of float32 would
        overflow, and losses would vanish.
        """
        weighted = [(micro, micro.batch.weights) for micro in micro_batches if micro.batch.weights is not None]
        if not weighted:
            return micro_batches
        largest = max(self.ranks.gather(max(float(weights.max()) for _, weights in weighted)))
        factor = 2.0 ** -frexp(largest)[1]
        return [
            replace(micro, batch=replace(micro.batch, weights=(weights.double() * factor).float()))
            for micro, weights in weighted
        ]

    def _denominators(self, micro_batches: Sequence[PolicyMicroBatch]) -> LossDenominators:
        """Return the denominators of the losses, summed over `micro_batches` of this rank only."""
        parts = [self.model.denominators(micro.batch, self.plan) for micro in micro_batches]
        return LossDenominators(*map(sum, zip(*parts, strict=True)))

    def _seed(self, update: int, number: int) -> int:
        """Return the dropout seed of micro-batch `number` of this rank in an update.

        Because the seed is computed from these numbers, a checkpoint need not save a random state.
        """
        key = (self.settings.seed, update, number, self.ranks.rank)
        return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))

    def _gradients(self, done: AppliedUpdate, number: int) -> dict[str, float]:
        report = {
            "grad_norm": sqrt(sum(norm**2 for norm in done.norms.values())),
            "updates_skipped": float(self.skipped.total),
        }
        report |= {f"grad_norm/{name}": norm for name, norm in done.norms.items()}
        return report | {f"learning_rate/{group.name}": group.rate(number) for group in self.groups}

    def _counts(self, micro_batches: Sequence[PolicyMicroBatch], seconds: float) -> dict[str, float]:
        counts = {
            "tokens": float(sum(micro.tokens for micro in micro_batches)),
            "padding": float(sum(micro.padding for micro in micro_batches)),
            "rows": float(sum(len(micro.batch.input_ids) for micro in micro_batches)),
            "examples": float(sum(micro.batch.examples for micro in micro_batches)),
        }
        counts = self.ranks.sum(counts)
        return {
            "tokens": counts["tokens"],
            "rows": counts["rows"],
            "padding_fraction": counts["padding"] / (counts["padding"] + counts["tokens"]),
            "samples_per_second": counts["examples"] / seconds,
            "timing/train": seconds,
            "memory/peak_gib": max(self.ranks.gather(peak_memory_gib(self.ranks.device))),
        }
