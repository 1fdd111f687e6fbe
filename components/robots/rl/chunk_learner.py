"""One step of a policy that learns from its own answers, whatever the loss: answers in, changed weights and numbers
out.
"""

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

from armature.components.robots.imitation.opening import parameter_groups, scheduled
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.rl.loader import ActionChunkBatch, Load, loaded_ahead
from armature.components.robots.rl.settings import GAE, RobotRLTrainerSettings
from armature.components.robots.rl.table import ActionChunkSample
from armature.components.training.engine import AppliedUpdate, ParameterGroup, TrainingEngine, peak_memory_gib
from armature.components.training.ranks import Ranks

# Which answers of a step each update has. Torch-free.


def update_rows(count: int, settings: RobotRLTrainerSettings, number: int) -> list[list[int]]:
    """The answers of each update of step `number`, as many in each as evenness allows: AdamW's steps are of one size,
    and one made of what is left over would be noise."""
    parts = ceil(count / (settings.samples_per_update or max(count, 1)))
    found = []
    for epoch in range(settings.epochs):
        order = np.random.default_rng((settings.seed, number, epoch)).permutation(count).tolist()
        found += [order[part::parts] for part in range(parts)]
    return found


RATIOS, ANSWERS, SLOTS = "ratios", "answers", "slots"
"""How many there were: what sums are divided by. Slots of rows have a token or padding."""
OF_ANSWERS, PADDING = ("value/loss", "value/clipped_fraction"), "padding_fraction"
"""Sums over answers, and over slots; the others are over ratios."""


@dataclass(frozen=True)
class Update:
    """The `index`-th (from 0) of `count` updates of step `step`, of `samples`, on all ranks together.

    solved: episodes of the step that solved their task. mean_advantage: of all answers of the step.
    """

    step: int
    index: int
    count: int
    samples: Sequence[ActionChunkSample]
    solved: frozenset[str]
    mean_advantage: float


class ActionChunkLearner(TrainingEngine[MolmoAct2]):
    """A policy, its optimizer, and in which updates answers change them.

    Args:
        load: gives samples their tensors.
        shard: splits a model without weights over the ranks and gives each its shards, where every rank would else
            hold all of it; a value head is there already.
    """

    def __init__(
        self,
        model: MolmoAct2,
        settings: RobotRLTrainerSettings,
        load: Load,
        ranks: Ranks | None = None,
        shard: Callable[[MolmoAct2], None] | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.settings, self._load = settings, load
        if settings.torch_compile:
            model.compile_layers(dynamic=True, split=shard is not None)
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

    @abstractmethod
    def _losses(
        self, samples: Sequence[ActionChunkSample], part: ActionChunkBatch, update: Update
    ) -> tuple[Tensor, dict[str, float]]:
        """The addend of some answers of an update, and sums of metrics, with how many RATIOS, ANSWERS and SLOTS.

        Args:
            part: what the samples were loaded as, on the model's device.
        """

    def step(self, samples: Sequence[ActionChunkSample]) -> dict[str, float]:
        """Train on the answers of one step, `epochs` times; every rank calls it with the same.

        A step without answers, because every group agreed or none was solved, changes nothing and counts. With
        `target_kl` the step ends before an update whose answers are farther than that from the policy that played.
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
        parts = [self._own(update.samples) for update in updates]
        with closing(loaded_ahead(self._load, [part for own in parts for part, _ in own])) as loaded:
            for update, own in zip(updates, parts, strict=True):
                kl = 0.0
                for part, real in own:
                    loss, found = self._losses(part, next(loaded).to(self.ranks.device), update)
                    self.backward(loss if real else 0.0 * loss)
                    for name, value in found.items() if real else ():
                        sums[name] += value
                    kl += found.get("kl", 0.0) * real
                if self._too_far(kl, update):
                    self.discard()
                    break
                done = self._apply(update)
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
            "answers_per_second": sum(len(update.samples) for update in updates[:computed]) / seconds,
            "timing/train_s": seconds,
            "memory/peak_gib": max(self.ranks.gather(peak_memory_gib(self.ranks.device))),
            **{f"learning_rate/{name}": rate for name, rate in self.last_rates().items()},
        }

    def _too_far(self, kl: float, update: Update) -> bool:
        """Whether the step ends before this update. kl: of this rank's answers, summed over ratios."""
        return False

    def _apply(self, update: Update) -> AppliedUpdate:
        return self.update(update.step)

    def _updates(self, count: int, number: int) -> list[list[int]]:
        return update_rows(count, self.settings, number)

    def _own(self, samples: Sequence[ActionChunkSample]) -> list[tuple[Sequence[ActionChunkSample], bool]]:
        """The micro-batches of this rank, and whether they count.

        Where ranks gather a model that is split, one that has fewer micro-batches than others computes dummy samples.
        """
        size, width = self.ranks.size, self.settings.micro_batch_size
        mine = samples[self.ranks.rank :: size]
        parts = [(mine[start : start + width], True) for start in range(0, len(mine), width)]
        most = ceil(ceil(len(samples) / size) / width) if self.sharded else 0
        return parts + [(samples[:1], False)] * (most - len(parts))
