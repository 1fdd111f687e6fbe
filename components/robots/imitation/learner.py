"""One update of a policy: micro-batches in, changed weights and numbers out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from armature.components.robots.imitation.data import PolicyMicroBatch
from armature.components.robots.imitation.opening import parameter_groups
from armature.components.robots.imitation.settings import VLATrainerSettings
from armature.components.robots.policies.molmoact2.modeling.losses import LossDenominators, LossPlan, PolicyLosses
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.training.engine import AppliedUpdate, TrainingEngine, peak_memory_gib
from armature.components.training.ranks import Ranks

LOSSES = {"loss": "total", "loss/flow": "flow", "loss/cross_entropy": "cross_entropy", "loss/z": "z"}
"""Names in the history, and attributes of the model's losses."""


class PolicyLearner(TrainingEngine[MolmoAct2]):
    """A policy, its optimizer, and how a batch changes them.

    Args:
        model: what of it requires a gradient is trained.
        plan: what is trained of an example, and how parts are weighed.
        shard: splits a model without weights over the ranks and gives each its shards, where every rank would else
            hold all of it.
    """

    def __init__(
        self,
        model: MolmoAct2,
        settings: VLATrainerSettings,
        plan: LossPlan,
        ranks: Ranks | None = None,
        shard: Callable[[MolmoAct2], None] | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.settings, self.plan = settings, plan
        model.checkpoint_gradients(settings.gradient_checkpointing)
        if settings.torch_compile:
            model.compile_layers(dynamic=True, split=shard is not None)
        if shard is not None:
            shard(model)
        else:
            model.to(ranks.device)
            if settings.mode == "expert":
                model.freeze_vlm(ranks.device)
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
        """Make one update of the micro-batches of all ranks. Every rank calls it with as many.

        The loss is that of all examples at once, however they are spread over micro-batches and ranks. An update with
        a gradient that is not finite is skipped: weights and optimizer stay, and the step counts.

        Returns:
            Losses, gradient norms, learning rates, padding and speed, over all ranks.
        """
        began = perf_counter()
        number = self.steps_done + 1
        self.model.train()
        if self.settings.mode == "expert":
            self.model.vlm.eval()
        ready = [micro.to(self.ranks.device) for micro in micro_batches]
        denominators = self._denominators(micro_batches)
        found: list[dict[str, Tensor]] = []
        for index, micro in enumerate(ready):
            torch.manual_seed(self._seed(number, index))
            losses: PolicyLosses = self.model(micro.batch, micro.draws, self.plan, denominators)
            self.backward(losses.total)
            found.append({name: getattr(losses, attribute).detach() for name, attribute in LOSSES.items()})
        done = self.update(number)
        sums = {name: sum(float(each[name]) for each in found) for name in LOSSES}
        report = self.ranks.sum(sums) | self._gradients(done, number)
        self.steps_done = number
        return report | self._counts(micro_batches, perf_counter() - began)

    @torch.no_grad()
    def score(self, micro_batches: Iterable[PolicyMicroBatch]) -> dict[str, float]:
        """The losses of all these examples together, without dropout. Every rank calls it with the same."""
        self.model.eval()
        sums, totals = dict.fromkeys(LOSSES, 0.0), LossDenominators(0.0, 0.0)
        ready = [micro.to(self.ranks.device) for micro in micro_batches]
        for micro in ready:
            totals = totals + LossDenominators.of(micro.batch, self.plan)
        for micro in ready:
            losses = self.model(micro.batch, micro.draws, self.plan, totals)
            for name, attribute in LOSSES.items():
                sums[name] += float(getattr(losses, attribute))
        return sums

    def _denominators(self, micro_batches: Sequence[PolicyMicroBatch]) -> LossDenominators:
        total = LossDenominators(0.0, 0.0)
        for micro in micro_batches:
            total = total + LossDenominators.of(micro.batch, self.plan)
        return LossDenominators(**self.ranks.sum({"examples": total.examples, "token_weight": total.token_weight}))

    def _seed(self, update: int, number: int) -> int:
        """Of the dropout in a micro-batch of this rank, so that none of it has to be saved."""
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
