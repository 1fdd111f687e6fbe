"""One step of a policy that learns from rewards: answers and their advantages in, changed weights and numbers out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from components.policies.molmoact2.modeling.flow_sde import noise_scales, step_logprobs
from components.policies.molmoact2.modeling.model import MolmoAct2
from components.policies.molmoact2.processing.batch import PolicyBatch
from components.policies.molmoact2.sampling import InferencePlan
from components.training.engine import TrainingEngine
from components.training.memory import peak_memory_gib
from components.training.ranks import Ranks
from components.vla.groups import parameter_groups
from components.vla_rl.settings import RobotRLTrainerSettings
from components.vla_rl.table import AnswerSample
from components.vlm.objectives import MAX_LOG_RATIO, OBJECTIVES, Tokens


@dataclass(frozen=True)
class AnswerBatch:
    """E answers as tensors.

    batch: the observations. before, after: (E, T, D) float32, flow_step: (E,) int64. counted: (E, T, D) bool, actions
    that were carried out and dimensions of the robot. logprobs: (N,) float64, the sampler's of the counted numbers, in
    order. advantages: (E,) float32.
    """

    batch: PolicyBatch
    before: Tensor
    after: Tensor
    flow_step: Tensor
    counted: Tensor
    logprobs: Tensor
    advantages: Tensor

    def to(self, device: torch.device) -> AnswerBatch:
        return AnswerBatch(**{name: value.to(device) for name, value in vars(self).items()})

    @property
    def rows(self) -> Tensor:
        """(N,) int64: which answer a counted number belongs to."""
        return self.counted.nonzero()[:, 0]


Load = Callable[[Sequence[AnswerSample]], AnswerBatch]


class RobotRLLearner(TrainingEngine[MolmoAct2]):
    """A policy, its optimizer, and how answers change them.

    Args:
        plan: how the answers were sampled. noise_level: Flow-SDE's η.
        load: gives samples their tensors.
    """

    def __init__(
        self,
        model: MolmoAct2,
        settings: RobotRLTrainerSettings,
        plan: InferencePlan,
        noise_level: float,
        load: Load,
        ranks: Ranks | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.settings, self.plan, self._load = settings, plan, load
        self._sigmas = noise_scales(plan.steps, noise_level)
        if settings.mode == "expert":
            model.freeze_vlm(ranks.device)
        if settings.torch_compile:
            model.compile_layers(dynamic=True)
        super().__init__(
            model.to(ranks.device).eval(),  # with dropout, no ratio would be 1
            parameter_groups(model, settings),
            ranks,
            sharded=False,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            max_grad_norm=settings.max_grad_norm,
            clip_groups=True,
        )

    def step(self, samples: Sequence[AnswerSample]) -> dict[str, float]:
        """Train on the answers of one step, `epochs` times; every rank calls it with the same.

        A step without answers, because every group agreed, changes nothing and counts.
        """
        began, number = perf_counter(), self.steps_done + 1
        sums: dict[str, float] = defaultdict(float)
        norms, skipped = [], 0
        for rows in self._updates(len(samples), number):
            chosen = [samples[row] for row in rows]
            count = len(chosen) if self.settings.ratio == "chunk" else sum(len(each.logprobs) for each in chosen)
            for part in self._own(chosen):
                self._accumulate(part, count, sums)
            done = self.update(number)
            norms.append(sqrt(sum(norm**2 for norm in done.norms.values())))
            skipped += not done.finite
        self.steps_done = number
        totals = self.ranks.sum({"ratios": 0.0, **sums})
        ratios = max(totals.pop("ratios"), 1.0)
        report = {"loss": totals.pop("loss", 0.0) / max(len(norms), 1)}
        report |= {name: value / ratios for name, value in totals.items()}
        seconds = perf_counter() - began
        return report | {
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "updates": float(len(norms)),
            "updates_skipped": float(skipped),
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
            scores += _row_sums(self._logprobs(part), part).tolist()
        return scores

    def _updates(self, count: int, number: int) -> list[list[int]]:
        """The answers of each update, as many in each as evenness allows: AdamW's steps are of one size, and one made
        of what is left over would be noise."""
        parts = ceil(count / (self.settings.samples_per_update or max(count, 1)))
        found = []
        for epoch in range(self.settings.epochs):
            order = np.random.default_rng((self.settings.seed, number, epoch)).permutation(count).tolist()
            found += [order[part::parts] for part in range(parts)]
        return found

    def _own(self, samples: Sequence[AnswerSample]) -> list[AnswerBatch]:
        mine = samples[self.ranks.rank :: self.ranks.size]
        width = self.settings.micro_batch_size
        return [self._load(mine[start : start + width]) for start in range(0, len(mine), width)]

    def _accumulate(self, part: AnswerBatch, count: int, sums: dict[str, float]) -> None:
        part = part.to(self.ranks.device)
        logprobs, behavior, rows = self._logprobs(part), part.logprobs, part.rows
        if self.settings.ratio == "chunk":
            logprobs, behavior = _row_sums(logprobs, part), _row_sums(behavior, part)
            rows = torch.arange(len(part.advantages), device=rows.device)
        advantages = part.advantages[rows]
        tokens = Tokens(logprobs, behavior, behavior, advantages, rows, len(part.advantages))
        result = OBJECTIVES[self.settings.objective.name](tokens, self.settings.objective)
        loss = result.loss.sum() / count
        self.backward(loss)
        with torch.no_grad():
            difference = (logprobs - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            added = {
                "ratios": float(len(rows)),
                "importance_ratio": float(difference.exp().sum()),
                "kl": float((difference.expm1() - difference).sum()),
                "clipped_low_fraction": float(result.low.sum()),
                "clipped_high_fraction": float(result.high.sum()),
            }
        for name, value in (added | {"loss": float(loss.detach())}).items():
            sums[name] += value

    def _logprobs(self, part: AnswerBatch) -> Tensor:
        """(N,) float64 of the counted numbers."""
        times = part.flow_step / self.plan.steps
        velocity = self.model.velocity(
            part.batch, part.before, times, self.plan.bidirectional_images, self.plan.hides_answers
        )
        return step_logprobs(part.before, part.after, velocity, part.flow_step, self._sigmas)[part.counted]


def _row_sums(values: Tensor, part: AnswerBatch) -> Tensor:
    """(E,) sums of `values` (N,) over the numbers of each answer."""
    return values.new_zeros(len(part.advantages)).index_add(0, part.rows, values)
