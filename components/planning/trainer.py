"""The trainer on the virtual clock: the real plan of micro-batches, their time, and a trainer that may die."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import TrainerError
from armature.components.planning.clock import VirtualLoop
from armature.components.planning.costs import Costs, TrainerCosts
from armature.components.planning.workload import PlannedEpisode
from armature.components.vlm.plan import MicroBatch, micro_batches, packed_micro_batches, updates
from armature.components.vlm.settings import TrainerSettings

IMAGE_TOKEN = -1
"""No token of a planned sample."""


@dataclass(frozen=True)
class PlannedRollout:
    """A rollout that is trained on: the group that shares its first prompt, and its turns."""

    group: str
    episode: PlannedEpisode


def samples_of(rollouts: Sequence[PlannedRollout], dialogue: bool) -> list[Sample]:
    """With `dialogue` the turns of an episode are one sample, as adapters join them; else each is one.

    Ids are equal where tokens would be.
    """
    groups = {rollout.group: index for index, rollout in enumerate(rollouts)}
    samples = []
    for index, rollout in enumerate(rollouts):
        turns = rollout.episode[-1:] if dialogue else rollout.episode
        shared = rollout.episode[0].prompt_tokens
        for number, turn in enumerate(turns):
            length = turn.prompt_tokens + turn.completion_tokens
            ids = np.full(length, len(rollouts) + index * 1000 + number, np.int32)
            if dialogue or number == 0:
                ids[: min(shared, length)] = groups[rollout.group]
            samples.append(_sample(ids))
    return samples


def _sample(ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Sample:
    none, yes = np.zeros(0, np.float32), np.zeros(0, np.bool_)
    return Sample("", "", "", ids, yes, none, ids, none, 0.0, ())


def training_seconds(
    samples: Sequence[Sample], settings: TrainerSettings, costs: TrainerCosts, ranks: int, sharing: int = 1
) -> float:
    """Seconds of a step: in each round `sharing` ranks have one micro-batch together, and the slowest counts."""
    seconds, at_once = 0.0, ranks // sharing
    for rows in updates(len(samples), settings.samples_per_update):
        planned = list(_planned(samples, rows, settings, at_once))
        for start in range(0, len(planned), at_once):
            tokens = max(planned[start : start + at_once]) / sharing
            seconds += costs.micro_batch_seconds + max(tokens * costs.token_seconds, costs.gather_seconds)
            seconds += costs.exposed_seconds
        seconds += costs.update_seconds
    return seconds


def _planned(samples: Sequence[Sample], rows: Sequence[int], settings: TrainerSettings, ranks: int) -> Iterator[int]:
    """Tokens that each micro-batch computes."""
    tokens, most = settings.max_tokens_per_micro_batch, settings.max_rows_per_micro_batch
    if not settings.packing:
        for micro in micro_batches(samples, rows, tokens, most, ranks):
            yield len(micro.rows) * max(len(sample.input_ids) for sample in micro.samples)
        return
    for micro in packed_micro_batches(samples, rows, tokens, most, IMAGE_TOKEN, ranks):
        yield _packed_tokens(micro)


def _packed_tokens(micro: MicroBatch) -> int:
    """What its samples begin with counts once."""
    seen: set[int] = set()
    tokens = 0
    for sample in micro.samples:
        first = int(sample.input_ids[0])
        shared = int((sample.input_ids == first).sum())
        tokens += len(sample.input_ids) - shared * (first in seen)
        seen.add(first)
    return tokens


class SimulatedTrainer:
    """What `with_restarts` needs of a trainer; it dies as `costs.failures` says. `busy`: seconds of steps."""

    def __init__(self, costs: Costs, ranks: int, loop: VirtualLoop, random: np.random.Generator) -> None:
        self._costs, self._loop, self._random = costs, loop, random
        hours = costs.failures.hours_between
        self._mean = hours * 3600 / ranks if hours else 0.0
        self._dies_at = self._next_death()
        self._saved = 0
        self._seconds: dict[int, float] = {}
        self.alive, self.busy, self.failures = True, 0.0, 0

    def _next_death(self) -> float:
        return self._loop.time() + float(self._random.exponential(self._mean)) if self._mean else float("inf")

    def step(self, step: int, seconds: float) -> None:
        """
        Raises:
            TrainerError: it died, before it was asked or meanwhile.
        """
        self._seconds[step] = seconds
        self._work(seconds)
        self.busy += seconds

    def save(self, step: int) -> None:
        """Raises TrainerError as `step` does."""
        self._work(self._costs.trainer.checkpoint_seconds)
        self._saved = step
        self._seconds = {number: seconds for number, seconds in self._seconds.items() if number > step}

    def needed(self) -> None:
        """Raises TrainerError where it is not alive."""
        self._work(0.0)

    def _work(self, seconds: float) -> None:
        if self.alive and self._loop.time() + seconds < self._dies_at:
            self._loop.wait(seconds)
            return
        self._loop.wait(max(0.0, min(seconds, self._dies_at - self._loop.time())) if self.alive else 0.0)
        self.alive = False
        self.failures += 1
        raise TrainerError(
            "the simulated trainer dies again and again, before it is back at the step where it died",
            where=f"a failure every {self._mean:,.0f} s",
            remedy="save more often (trainer.save_every), or take fewer ranks",
        )

    def restart(self) -> None:
        self._loop.wait(self._costs.failures.trainer_restart_seconds)
        self.alive, self._dies_at = True, self._next_death()

    def resume(self) -> int:
        """The step of the newest checkpoint."""
        return self._saved

    def again(self, step: int) -> None:
        """Apply a step once more. Raises TrainerError as `step` does."""
        self._work(self._seconds[step])
        self.busy += self._seconds[step]
