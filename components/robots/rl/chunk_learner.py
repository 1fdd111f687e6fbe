"""Base of the robot policy's learners: one training step on action chunks, for any loss."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil, sqrt
from time import perf_counter

import numpy as np
from torch import Tensor

from armature.components.robots.imitation.opening import parameter_groups, place, scheduled
from armature.components.robots.policies.model import PolicyModel
from armature.components.robots.rl.loader import ActionChunkBatch, Load, loaded_ahead
from armature.components.robots.rl.settings import GAE, RobotRLTrainerSettings
from armature.components.robots.rl.table import ActionChunkSample
from armature.components.training.engine import AppliedUpdate, ParameterGroup, TrainingEngine, peak_memory_gib
from armature.components.training.ranks import Ranks

# --- Distribution of a step's chunks over updates ---


def update_rows(count: int, settings: RobotRLTrainerSettings, number: int) -> list[list[int]]:
    """Return, for each update of step `number`, the row numbers of its chunks.

    All updates have nearly the same size: AdamW takes steps of one size, so that an update made of a small remainder
    would mostly be noise.

    Example:
        >>> settings = RobotRLTrainerSettings(max_steps=1, micro_batch_size=1, samples_per_update=2)
        >>> [len(rows) for rows in update_rows(5, settings, number=1)]
        [2, 2, 1]
    """
    parts = ceil(count / (settings.samples_per_update or max(count, 1)))
    updates = []
    for epoch in range(settings.epochs):
        order = np.random.default_rng((settings.seed, number, epoch)).permutation(count).tolist()
        updates += [order[part::parts] for part in range(parts)]
    return updates


RATIOS, ANSWERS, SLOTS = "ratios", "answers", "slots"
"""Names of the counts that sums of metrics are divided by: probability ratios, chunks, and positions of packed rows.
A position holds a token or padding."""
OF_ANSWERS, PADDING = ("value/loss", "value/clipped_fraction"), "padding_fraction"
"""Metrics that are means over chunks, and the metric that is a mean over positions of packed rows. All other metrics
are means over probability ratios."""


@dataclass(frozen=True)
class Update:
    """Update number `index` (from 0) of the `count` updates of step `step`.

    samples: chunks of the update, on all ranks together. solved: ids of the step's episodes that solved their task.
    mean_advantage: mean advantage of all chunks of the step.
    """

    step: int
    index: int
    count: int
    samples: Sequence[ActionChunkSample]
    solved: frozenset[str]
    mean_advantage: float


class ActionChunkLearner(TrainingEngine[PolicyModel]):
    """Training engine of a robot policy that learns from its own action chunks.

    Args:
        load: turns samples into tensors.
        shard: splits a model without weights over the ranks and loads each rank's shard; None: every rank holds the
            whole model. A value head has been added before.
    """

    def __init__(
        self,
        model: PolicyModel,
        settings: RobotRLTrainerSettings,
        load: Load,
        ranks: Ranks | None = None,
        shard: Callable[[PolicyModel], None] | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.settings, self._load = settings, load
        place(model, settings, ranks, shard)
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

    @abstractmethod
    def _losses(
        self, samples: Sequence[ActionChunkSample], part: ActionChunkBatch, update: Update
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one micro-batch of an update, and a dict for the metrics.

        The dict has the sum of each metric, and the counts RATIOS, ANSWERS and SLOTS that the sums are divided by. The
        gradients of all micro-batches are added up, so each loss is already divided by the size of the update.

        Args:
            samples: chunks of the micro-batch. part: the same chunks as tensors, on the model's device.
        """

    def step(self, samples: Sequence[ActionChunkSample]) -> dict[str, float]:
        """Train on the chunks of one step, `epochs` times, and return its metrics.

        Every rank is called with the same samples. A step may have no chunks, because the episodes of each group earned
        the same or no episode was solved; such a step changes no weight and still counts. With `target_kl` the step
        ends before an update on whose chunks the KL divergence from the rollout policy exceeds `target_kl`.
        """
        began, number = perf_counter(), self.steps_done + 1
        sums: dict[str, float] = defaultdict(float)
        norms, skipped, rows = [], 0, self._updates(len(samples), number)
        solved = frozenset(each.episode_id for each in samples if each.done and not each.truncated)
        mean = sum(each.advantage for each in samples) / max(len(samples), 1)
        updates = [
            Update(number, index, len(rows), [samples[row] for row in chosen], solved, mean)
            for index, chosen in enumerate(rows)
        ]
        parts = [self._local_parts(update.samples) for update in updates]
        with closing(loaded_ahead(self._load, [part for local in parts for part, _ in local])) as loaded:
            for update, local in zip(updates, parts, strict=True):
                kl = 0.0
                for part, real in local:
                    loss, metrics = self._losses(part, next(loaded).to(self.ranks.device), update)
                    self.backward(loss if real else 0.0 * loss)
                    for name, value in metrics.items() if real else ():
                        sums[name] += value
                    kl += metrics.get("kl", 0.0) * real
                if self._too_far(kl, update):
                    self.discard()
                    break
                done = self._apply(update)
                norms.append(sqrt(sum(norm**2 for norm in done.norms.values())))
                skipped += not done.finite
        self.steps_done = number
        names = set().union(*self.ranks.gather(list(sums)))  # a rank without chunks has no names
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
            "answers_per_second": sum(len(update.samples) for update in updates[:computed]) / seconds,
            "timing/train_s": seconds,
            "memory/peak_gib": max(self.ranks.gather(peak_memory_gib(self.ranks.device))),
            **{f"learning_rate/{name}": rate for name, rate in self.last_rates().items()},
        }

    def _too_far(self, kl: float, update: Update) -> bool:
        """Return True if the step should end before this update.

        kl: the sum of the KL divergence over the update's probability ratios on this rank.
        """
        return False

    def _apply(self, update: Update) -> AppliedUpdate:
        return self.update(update.step)

    def _updates(self, count: int, number: int) -> list[list[int]]:
        return update_rows(count, self.settings, number)

    def _local_parts(self, samples: Sequence[ActionChunkSample]) -> list[tuple[Sequence[ActionChunkSample], bool]]:
        """Return this rank's micro-batches as pairs (samples, True), followed by dummy micro-batches as pairs (samples,
        False).

        Dummies do not change the gradient. A sharded model needs them because all ranks gather its weights together, so
        every rank must run the same number of micro-batches.
        """
        size, width = self.ranks.size, self.settings.micro_batch_size
        mine = samples[self.ranks.rank :: size]
        parts = [(mine[start : start + width], True) for start in range(0, len(mine), width)]
        most = ceil(ceil(len(samples) / size) / width) if self.sharded else 0
        return parts + [(samples[:1], False)] * (most - len(parts))
