"""Direct preference optimization: the samples of pairs, their reference log-probs, and what is measured of them.

The loss itself is `armature.components.vlm.objectives.dpo`. A pair is two neighboring samples, the chosen one first,
with the advantages 1 and -1. Their reference log-probs, by the initial model, take the place of a sampler's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from armature.components.contracts.batches import Sample
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.rollouts.batches.ratios import ratios_file, read_log_ratios
from armature.components.rollouts.batches.table import SampleSource, read_batch, write_batch
from armature.components.vlm.client import TrainerClient
from armature.components.vlm.settings import TrainerSettings
from armature.components.vlm.sft.conversations import CHOSEN
from armature.components.vlm.sft.fit import METRICS


def samples_of_pairs(outputs: GenerateOutputs, adapter: SampleSource) -> tuple[list[Sample], Counter[str]]:
    """Return the two samples of each pair, the chosen one first, and the number of dropped pairs by reason.

    A pair is dropped if one of its answers cannot be trained on, or is several sequences because the chat template
    rewrites earlier turns.
    """
    groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for each in outputs.trajectories:
        groups[each.group_id].append(each)
    samples: list[Sample] = []
    drops: Counter[str] = Counter()
    for pair in groups.values():
        signs = {each.trajectory_id: 1.0 if each.trajectory_id.endswith(CHOSEN) else -1.0 for each in pair}
        pair.sort(key=lambda each: -signs[each.trajectory_id])
        advantages = {
            (each.trajectory_id, turn.index): signs[each.trajectory_id] for each in pair for turn in each.turns
        }
        made, dropped = adapter.samples(GenerateOutputs(pair), advantages)
        if dropped or len(made) != 2:
            drops[next(iter(dropped), "several_sequences")] += 1
        else:
            samples += made
    return samples, drops


def dpo_trainer(trainer: TrainerSettings, beta: float) -> TrainerSettings:
    """Return the settings of a trainer that minimizes the mean loss of pairs in place of the cross-entropy."""
    objective = {"name": "function", "function": "armature.components.vlm.objectives:dpo", "args": {"beta": beta}}
    return TrainerSettings.model_validate(trainer.model_dump() | {"objective": objective, "aggregation": "sequence"})


class PreferenceLoss:
    """The mean loss of pairs; see `TrainingLoss`. Rewards are beta (log-prob - reference), summed over an answer.

    Args:
        workspace: a folder that outlives the run, for the table with reference log-probs.
        train, heldout: samples of pairs.
        at_once: number of pairs that are scored with one command.
    """

    SHOWN: ClassVar[Mapping[str, str]] = {"margin": "reward_margin", "accuracy": "pair_accuracy"}

    def __init__(
        self,
        trainer: TrainerClient,
        workspace: Path,
        train: Sequence[Sample],
        heldout: Sequence[Sample],
        beta: float,
        at_once: int,
    ) -> None:
        self._trainer, self._workspace, self._train, self._heldout = trainer, workspace, train, heldout
        self._beta, self._at_once = beta, at_once

    def begin(self, batch: Path) -> None:
        """Score all samples with the initial weights."""
        samples = [*self._train, *self._heldout]
        scored = zip(samples, self._scores(samples, batch), strict=True)
        write_batch(self._workspace, [replace(each, behavior_logprobs=scores) for each, scores in scored])

    @cached_property
    def _references(self) -> dict[str, Sample]:
        """The samples with reference log-probs by their ids, from the table that `begin` has written."""
        return {each.sample_id: each for each in read_batch(self._workspace)}

    def step(self, step: int, samples: Sequence[Sample], batch: Path) -> dict[str, float]:
        write_batch(batch, [self._references[each.sample_id] for each in samples])
        report = self._trainer.step(step, batch, ratios_file(batch, step))
        ratios = read_log_ratios(ratios_file(batch, step))
        metrics = {name: report[key] for key, name in METRICS.items() if key in report and name != "probability"}
        return metrics | self._rewards([ratios[each.sample_id] for each in samples])[0]

    def evaluate(self, batch: Path) -> dict[str, float]:
        if not self._heldout:
            return {}
        scores = list(self._scores(self._heldout, batch))
        references = [self._references[each.sample_id].behavior_logprobs for each in self._heldout]
        rewards, margins = self._rewards([now - before for now, before in zip(scores, references, strict=True)])
        sums = np.array([each.sum(dtype=np.float64) for each in scores])
        return rewards | {
            "loss": float(np.logaddexp(0, -margins).mean()),
            "chosen_likelier": float((sums[0::2] > sums[1::2]).mean()),
        }

    def _rewards(
        self, log_ratios: Sequence[npt.NDArray[np.float32]]
    ) -> tuple[dict[str, float], npt.NDArray[np.float64]]:
        """Return metrics of the rewards, and the margin of each pair, by the log-ratios of each sample's tokens."""
        rewards = self._beta * np.array([each.sum(dtype=np.float64) for each in log_ratios])
        chosen, rejected = rewards[0::2], rewards[1::2]
        margins = chosen - rejected
        metrics = {
            "reward_chosen": float(chosen.mean()),
            "reward_rejected": float(rejected.mean()),
            "reward_margin": float(margins.mean()),
            "pair_accuracy": float((margins > 0).mean()),
        }
        return metrics, margins

    def _scores(self, samples: Sequence[Sample], batch: Path) -> Iterator[npt.NDArray[np.float32]]:
        for start in range(0, len(samples), 2 * self._at_once):
            write_batch(batch, samples[start : start + 2 * self._at_once])
            yield from self._trainer.score(batch)
