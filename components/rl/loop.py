"""The RL loop: the order of a step's units, and how far rollouts may be ahead of the weights."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from armature.components.contracts.metrics import merged
from armature.components.contracts.stages import TRAINING, Artifact, Events, Units

SHOWN = {
    "loss": "loss",
    "ir": "importance_ratio",
    "ent": "entropy",
    "kl": "mismatch_kl",
    "rew": "reward",
    "acc": "heldout/accuracy",
    "success": "heldout/success",
}
"""Metrics that the progress bar shows: their short names there, mapped to their names in the history."""


class StepUnits(Protocol):
    """The units of work of which `run_loop` makes a training step.

    A unit may be called again after a crash; it then returns what it made before.
    """

    def rollouts(self, step: int) -> Artifact:
        """Play the rollouts of `step` and return them as an artifact."""
        ...

    def wait_for_rollouts(self, step: int) -> None:
        """Prepare for the loop to block on the rollouts of `step`, without which it cannot continue.

        An implementation may replace workers that are late with them, or do nothing.
        """
        ...

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        """Turn the rollouts of `step` into its batch of training samples."""
        ...

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        """Apply `step` to the weights and return the trainer's metrics."""
        ...

    def save(self, step: int) -> None:
        """Write a checkpoint if one is due after `step`."""
        ...

    def sync(self, version: int) -> None:
        """Give the weights after step `version` to the servers that sample."""
        ...

    def evaluates(self, step: int) -> bool:
        """Tell whether an evaluation is due after `step`."""
        ...

    def evaluate(self, step: int) -> bool:
        """Evaluate the weights after `step`; True ends the training."""
        ...

    def stopped(self) -> bool:
        """Tell whether somebody asked to end the training after the current step."""
        ...

    def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Add the metrics of `step` to the history.

        Args:
            metrics: the metrics that the trainer and the loop measured in this step.

        Returns:
            The complete row: `metrics`, and further metrics of the step's rollouts, batch and evaluation.
        """
        ...


@dataclass(frozen=True)
class LoopPlan:
    """The schedule of `run_loop`."""

    last: int
    """Number of the last step."""
    save_every: int = 1
    """Steps between checkpoints."""
    max_staleness: int = 0
    """Number of versions by which the weights that sample rollouts may be older than in on-policy training."""
    in_flight_updates: bool = False
    """Give servers new weights while rollouts are being played."""
    sync_every: int = 1
    """Steps between new weights for the servers; 0: never."""


def run_loop(steps: StepUnits, first: int, plan: LoopPlan, units: Units, events: Events) -> int:
    """Make steps `first` to `plan.last`, both included. The policy version is the number of steps applied.

    With `max_staleness` 0 the rollouts of a step are sampled by the weights after the step before (on-policy).

    With `max_staleness` 1 they are played while the trainer works on the step before, by weights that are one version
    older. New weights are not sent until the last of these rollouts is there. A checkpoint waits for them too, because
    a resumed run would not have the older weights to play them again. So the version that samples a token never depends
    on whether trainer or servers are faster.

    With `in_flight_updates` only the step that trains on rollouts waits for them. The rollouts of step k may start once
    the servers have version k - 1 - `max_staleness`, so no token of a step is sampled by an older version.

    An evaluation plays with the weights after its step. Nothing else plays meanwhile, unless updates are in flight.

    Returns:
        The last step that was made, which is before `plan.last` if an evaluation or `stopped` ended the training.
    """
    pending: deque[Future[Artifact]] = deque()
    begun, staleness, last = first - 1, plan.max_staleness, plan.last
    overlaps = staleness > 0 and not plan.in_flight_updates

    def begin(upcoming: int) -> None:
        nonlocal begun
        while begun < min(upcoming, last):
            begun += 1
            pending.append(units.submit(f"rollouts-{begun:05d}", steps.rollouts, begun))

    events.progress(TRAINING, first - 1, last)
    begin(first + staleness * plan.in_flight_updates)
    postfix: dict[str, float] = {}
    for step in range(first, last + 1):
        clock = _Clock()
        steps.wait_for_rollouts(step)
        rollouts = pending.popleft().result()
        clock.lap("timing/wait_for_rollouts")
        if overlaps:
            begin(step + 1)
        batch = units.submit(f"batch-{step:05d}", steps.batch, step, rollouts).result()
        clock.lap("timing/batch")
        metrics = units.submit(f"step-{step:05d}", steps.train, step, batch).result()
        clock.lap("timing/train")
        if overlaps and pending:
            steps.wait_for_rollouts(step + 1)
            pending[0].result()
            clock.lap("timing/wait_for_rollouts")
        steps.save(step)
        clock.lap("timing/save")
        if step < last and plan.sync_every and step % plan.sync_every == 0:
            units.submit(f"sync-{step:05d}", steps.sync, step).result()
        clock.lap("timing/sync")
        if plan.in_flight_updates:
            begin(step + 1 + staleness)
        ends = step == last
        if steps.evaluates(step):
            ends |= units.submit(f"evaluation-{step:05d}", steps.evaluate, step).result()
            clock.lap("timing/evaluation")
        if not ends:
            begin(step + 1)
        metrics = merged(trainer=metrics, loop=clock.laps | {"timing/step": sum(clock.laps.values())})
        metrics = steps.record(step, metrics)
        events.metrics(metrics, step)
        ends |= steps.stopped()
        # Keep showing the results of the last evaluation until the next one.
        evaluated = {short: value for short, value in postfix.items() if SHOWN[short].startswith("heldout/")}
        postfix = evaluated | {short: metrics[name] for short, name in SHOWN.items() if name in metrics}
        events.progress(TRAINING, step, last, **postfix)
        if ends:
            for future in pending:  # rollouts of steps that are not made because the training ended early
                future.result()
            return step
    return first - 1


class _Clock:
    """A stopwatch. `lap` adds the seconds since the previous lap to the sum with the given name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = self.laps.get(name, 0.0) + now - self._last, now
