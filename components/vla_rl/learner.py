"""One step of a policy that learns from rewards: answers and their advantages in, changed weights and numbers out."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import ceil, sqrt
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from components.policies.molmoact2.modeling.model import MolmoAct2
from components.training.engine import ParameterGroup, TrainingEngine
from components.training.memory import peak_memory_gib
from components.training.ranks import Ranks
from components.vla.groups import parameter_groups, scheduled
from components.vla_rl.likelihood import ActionLikelihood, Prediction
from components.vla_rl.settings import GAE, RobotRLTrainerSettings
from components.vla_rl.table import AnswerSample
from components.vla_rl.tensors import AnswerBatch
from components.vla_rl.updates import update_rows
from components.vla_rl.value_loss import value_loss
from components.vlm.objectives import MAX_LOG_RATIO, OBJECTIVES, Tokens

RATIOS, ANSWERS, SLOTS = "ratios", "answers", "slots"
"""How many there were: what sums are divided by. Slots of rows have a token or padding."""
OF_ANSWERS, PADDING = ("value/loss", "value/clipped_fraction"), "padding_fraction"
"""Sums over answers, and over slots; the others are over ratios."""
Load = Callable[[Sequence[AnswerSample]], AnswerBatch]


class RobotRLLearner(TrainingEngine[MolmoAct2]):
    """A policy, its optimizer, and how answers change them.

    Args:
        likelihood: of answers as they were sampled.
        load: gives samples their tensors.
        shard: splits a model without weights over the ranks and gives each its shards, where every rank would else
            hold all of it; a value head is there already.
    """

    def __init__(
        self,
        model: MolmoAct2,
        settings: RobotRLTrainerSettings,
        likelihood: ActionLikelihood,
        load: Load,
        ranks: Ranks | None = None,
        shard: Callable[[MolmoAct2], None] | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.settings, self.likelihood, self._load = settings, likelihood, load
        self._chunks = settings.ratio == "chunk"
        if isinstance(settings.advantage, GAE) and shard is None:
            model.add_value_head(settings.seed, likelihood.of_tokens)
        if settings.torch_compile:
            model.compile_layers(dynamic=True)
        if shard is not None:
            shard(model)
        else:
            model.to(ranks.device)
            if settings.mode == "expert":
                model.freeze_vlm(ranks.device)
        groups = parameter_groups(model, settings)
        if isinstance(advantage := settings.advantage, GAE):
            assert model.value_head is not None
            rate, head = scheduled(advantage.value_lr, settings), list(model.value_head.parameters())
            groups.append(ParameterGroup("value_head", head, rate, settings.weight_decay))
        super().__init__(
            model.eval(),  # with dropout, no ratio would be 1
            groups,
            ranks,
            sharded=shard is not None,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            max_grad_norm=settings.max_grad_norm,
            clip_groups=True,
        )
        expert = self.model.action_expert  # as it is before a checkpoint is loaded
        self._start = [copy.deepcopy(expert).requires_grad_(False)] if settings.kl_coefficient else []

    def step(self, samples: Sequence[AnswerSample]) -> dict[str, float]:
        """Train on the answers of one step, `epochs` times; every rank calls it with the same.

        A step without answers, because every group agreed, changes nothing and counts. With `target_kl` the step ends
        before an update whose answers are farther than that from the policy that played.
        """
        began, number = perf_counter(), self.steps_done + 1
        sums: dict[str, float] = defaultdict(float)
        norms, skipped, updates = [], 0, self._updates(len(samples), number)
        solved = frozenset(each.episode_id for each in samples if each.done and not each.truncated)
        for rows in updates:
            chosen, before = [samples[row] for row in rows], sums["kl"]
            ratios = len(chosen) if self._chunks else sum(len(each.logprobs) for each in chosen)
            for part, real in self._own(chosen):
                loss, found = self._losses(part, ratios, len(chosen), solved)
                self.backward(loss if real else 0.0 * loss)
                for name, value in found.items() if real else ():
                    sums[name] += value
            if (most := self.settings.target_kl) and self.ranks.sum({"kl": sums["kl"] - before})["kl"] > most * ratios:
                self.discard()
                break
            done = self.update(number)
            norms.append(sqrt(sum(norm**2 for norm in done.norms.values())))
            skipped += not done.finite
        self.steps_done = number
        names = set().union(*self.ranks.gather(list(sums)))  # a rank without answers has none
        totals = self.ranks.sum({name: sums[name] for name in sorted({"loss", *names})})
        counts = {name: totals.pop(name, 1.0) for name in (RATIOS, ANSWERS, SLOTS)}
        computed = min(len(norms) + 1, len(updates))
        report = {"loss": totals.pop("loss") / max(computed, 1)}
        over = dict.fromkeys(OF_ANSWERS, ANSWERS) | {PADDING: SLOTS}
        report |= {name: value / counts[over.get(name, RATIOS)] for name, value in totals.items()}
        seconds = perf_counter() - began
        return report | {
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "updates": float(len(norms)),
            "updates_skipped": float(skipped),
            "updates_dropped": float(len(updates) - len(norms)),
            "answers_per_second": len(samples) * self.settings.epochs / seconds,
            "timing/train_s": seconds,
            "memory/peak_gib": max(self.ranks.gather(peak_memory_gib(self.ranks.device))),
            **{f"learning_rate/{group.name}": group.rate(number) for group in self.groups},
        }

    @torch.no_grad()
    def score(self, samples: Sequence[AnswerSample]) -> list[float]:
        """Of each answer the log-prob of all that counts; every rank calls it with the same, and each computes all."""
        width = self.settings.micro_batch_size
        scores: list[float] = []
        for start in range(0, len(samples), width):
            part = self._load(samples[start : start + width]).to(self.ranks.device)
            found = _row_sums(self.likelihood.logprobs(self._predictions(part)[0], part), part)
            scores += found[part.order.argsort()].tolist()
        return scores

    def _updates(self, count: int, number: int) -> list[list[int]]:
        return update_rows(count, self.settings, number)

    def _own(self, samples: Sequence[AnswerSample]) -> list[tuple[Sequence[AnswerSample], bool]]:
        """The micro-batches of this rank, and whether they count.

        Where ranks gather a model that is split, one that has fewer micro-batches than others computes dummy samples.
        """
        size, width = self.ranks.size, self.settings.micro_batch_size
        mine = samples[self.ranks.rank :: size]
        parts = [(mine[start : start + width], True) for start in range(0, len(mine), width)]
        most = ceil(ceil(len(samples) / size) / width) if self.sharded else 0
        return parts + [(samples[:1], False)] * (most - len(parts))

    def _losses(
        self, samples: Sequence[AnswerSample], ratios: int, answers: int, solved: frozenset[str]
    ) -> tuple[Tensor, dict[str, float]]:
        """The addend of some answers of an update, which has so many ratios and answers in all, and sums of metrics.

        Args:
            solved: episodes that solved their task.
        """
        part = self._load(samples).to(self.ranks.device)
        prediction, *start = self._predictions(part)
        logprobs = self._per_ratio(self.likelihood.logprobs(prediction, part), part)
        behavior = self._per_ratio(part.logprobs, part)
        rows = torch.arange(len(part.advantages), device=behavior.device) if self._chunks else part.rows
        tokens = Tokens(logprobs, behavior, behavior, part.advantages[rows], rows, len(part.advantages))
        result = OBJECTIVES[self.settings.objective.name](tokens, self.settings.objective)
        loss = result.loss.sum() / ratios
        difference = (logprobs.detach() - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        found = {
            "importance_ratio": difference.exp(),
            "kl": difference.expm1() - difference,
            "clipped_low_fraction": result.low,
            "clipped_high_fraction": result.high,
        }
        for other in start:
            found["kl/start"] = self._per_ratio(self.likelihood.divergences(prediction, other, part), part)
            loss = loss + self.settings.kl_coefficient * found["kl/start"].sum() / ratios
        if coefficient := self.settings.bc_coefficient:
            good = torch.tensor([each.episode_id in solved for each in samples], device=rows.device)[part.order][rows]
            found["bc/loss"] = -logprobs * good
            loss = loss + coefficient * found["bc/loss"].sum() / ratios
        if isinstance(gae := self.settings.advantage, GAE):
            found |= self._value_losses(prediction.states, part, gae)
            loss = loss + gae.value_loss_coef * found["value/loss"].sum() / answers
        found[PADDING] = part.batch.example_ids < 0
        counts = {RATIOS: len(rows), ANSWERS: len(part.advantages), SLOTS: part.batch.example_ids.numel()}
        sums = {"loss": loss} | {name: each.sum() for name, each in found.items()}
        return loss, counts | {name: float(each.detach()) for name, each in sums.items()}

    def _per_ratio(self, values: Tensor, part: AnswerBatch) -> Tensor:
        """Of each probability ratio, from those of the counted numbers (N,): (E,) sums, or as they are."""
        return _row_sums(values, part) if self._chunks else values

    def _predictions(self, part: AnswerBatch) -> list[Prediction]:
        """Of the model, and in training of the first one where there is a KL term."""
        return self.likelihood.predict(self.model, part, self._start if torch.is_grad_enabled() else ())

    def _value_losses(self, states: Tensor, part: AnswerBatch, settings: GAE) -> dict[str, Tensor]:
        """(E,) each."""
        assert self.model.value_head is not None and part.values is not None and part.value_targets is not None
        found = value_loss(self.model.value_head(states), part.values, part.value_targets, settings)
        return dict(zip(OF_ANSWERS, found, strict=True))


def _row_sums(values: Tensor, part: AnswerBatch) -> Tensor:
    """(E,) sums of `values` (N,) over the numbers of each answer."""
    return values.new_zeros(len(part.advantages)).index_add(0, part.rows, values)
