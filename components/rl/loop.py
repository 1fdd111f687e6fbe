"""The loop: which unit follows which, and how far rollouts may run ahead of the weights."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Protocol

from components.contracts.stages import Artifact, Events, Units

SHOWN = {
    "loss": "loss",
    "ir": "importance_ratio",
    "ent": "entropy",
    "kl": "mismatch_kl",
    "rew": "reward",
    "acc": "heldout/accuracy",
}
"""What the progress bar shows of a step's metrics, and how it calls them."""


class StepUnits(Protocol):
    """The units of one step. Each can be asked again after a crash and returns what it made before."""

    def rollouts(self, step: int) -> Artifact: ...

    def batch(self, step: int, rollouts: Artifact) -> Artifact: ...

    def train(self, step: int, batch: Artifact) -> dict[str, float]: ...

    def save(self, step: int) -> None: ...

    def sync(self, version: int) -> None: ...

    def evaluates(self, step: int) -> bool: ...

    def evaluate(self, step: int) -> bool: ...

    def record(self, step: int, metrics: dict[str, float]) -> None: ...


def run_loop(
    steps: StepUnits, first: int, last: int, max_staleness: int, units: Units, events: Events, sync_every: int = 1
) -> int:
    """Steps `first` to `last`, both included; the policy version is the number of steps applied.

    Returns the last step that was made: an evaluation may end the training before `last`.

    With `max_staleness` 0 the rollouts of a step are sampled by the weights of the step before (on-policy). With 1
    they are generated while the trainer works on the step before, by weights that are one version older: new weights
    wait until the last of them is there, and so does a checkpoint, for a run that resumes has no older weights to
    make them with. Which version samples a token never depends on which of the two is done first.

    New weights follow after the steps that `sync_every` divides; 0: never. An evaluation plays while nothing else
    does, by the weights after its step.
    """

    def collect(step: int) -> Future[Artifact]:
        events.progress("Training", step - 1, last)
        return units.submit(f"rollouts-{step:05d}", steps.rollouts, step)

    pending = collect(first) if first <= last else None
    postfix: dict[str, float] = {}
    for step in range(first, last + 1):
        assert pending is not None
        clock = _Clock()
        rollouts = pending.result()
        clock.lap("timing/wait_for_rollouts")
        ahead = collect(step + 1) if max_staleness > 0 and step < last else None
        batch = units.submit(f"batch-{step:05d}", steps.batch, step, rollouts).result()
        clock.lap("timing/batch")
        metrics = units.submit(f"step-{step:05d}", steps.train, step, batch).result()
        clock.lap("timing/train")
        if ahead is not None:
            ahead.result()
            clock.lap("timing/wait_for_rollouts")
        steps.save(step)
        if step < last and sync_every and step % sync_every == 0:
            units.submit(f"sync-{step:05d}", steps.sync, step).result()
        clock.lap("timing/sync")
        ends = step == last
        if steps.evaluates(step):
            ends |= units.submit(f"evaluation-{step:05d}", steps.evaluate, step).result()
            clock.lap("timing/evaluation")
        pending = ahead or (None if ends else collect(step + 1))
        metrics = metrics | clock.laps | {"timing/step": sum(clock.laps.values())}
        steps.record(step, metrics)
        events.metrics(metrics, step)
        kept = {short: value for short, value in postfix.items() if short == "acc"}  # until the next evaluation
        postfix = kept | {short: metrics[name] for short, name in SHOWN.items() if name in metrics}
        events.progress("Training", step, last, **postfix)
        if ends:
            return step
    return first - 1


class _Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = self.laps.get(name, 0.0) + now - self._last, now
