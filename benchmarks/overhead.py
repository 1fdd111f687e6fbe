"""Time of a step besides generating, training and syncing, which are replaced by fixed waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.table import Row, alternate, seconds

STEPS = 15
GENERATE, TRAIN, SYNC = 0.2, 0.2, 0.1  # seconds of a step's units, as sleep


class Sleeping:
    """Training steps whose units only sleep. So they take a fixed time and need no CPU."""

    def rollouts(self, step: int) -> Any:
        time.sleep(GENERATE)
        return step

    def wait_for_rollouts(self, step: int) -> None: ...

    def batch(self, step: int, rollouts: Any) -> Any:
        return step

    def save(self, step: int) -> None: ...

    def train(self, step: int, batch: Any) -> dict[str, float]:
        time.sleep(TRAIN)
        return {"loss": 0.0}

    def sync(self, version: int) -> None:
        time.sleep(SYNC)

    def evaluates(self, step: int) -> bool:
        return False

    def evaluate(self, step: int) -> bool:
        return False

    def stopped(self) -> bool:
        return False

    def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        return metrics


class Silent:
    """Implementation of the events that ignores all events."""

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def metrics(self, values: Any, step: int) -> None: ...

    def artifact(self, artifact: Any, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None: ...


def measure() -> list[Row]:
    from armature.components.configuration.stages import ThreadUnits
    from armature.components.rl.loop import LoopPlan, run_loop

    def bare() -> float:
        def work() -> None:
            steps = Sleeping()
            for step in range(1, STEPS + 1):
                steps.record(step, steps.train(step, steps.batch(step, steps.rollouts(step))))
                if step < STEPS:
                    steps.sync(step)

        return seconds(work) / STEPS * 1000

    def threads() -> float:
        return seconds(lambda: run_loop(Sleeping(), 1, LoopPlan(STEPS), ThreadUnits(), Silent())) / STEPS * 1000

    loop = alternate(3, threads, bare)
    tasks = _prefect()
    note = f"{tasks - loop.baseline:.0f} ms more, whatever the work"
    rows = [
        Row(
            "a step, units on threads",
            loop.ours,
            loop.baseline,
            "the units in a bare loop",
            "ms",
            "lower",
            spread=loop.spread,
        ),
        Row("a step, units as Prefect tasks", tasks, loop.baseline, "the units in a bare loop", "ms", "lower", note),
    ]
    return rows + _of_a_run()


def _prefect() -> float:
    """Return the milliseconds per step with PrefectUnits. They use a Prefect server of their own, which is started
    before the measurement."""
    from prefect import flow, task
    from prefect.testing.utilities import prefect_test_harness

    from armature.components.rl.loop import LoopPlan, run_loop
    from armature.tasks.events import PrefectUnits

    @task
    def stage() -> float:
        with PrefectUnits() as units:
            return seconds(lambda: run_loop(Sleeping(), 1, LoopPlan(STEPS), units, Silent())) / STEPS * 1000

    @flow
    def measured() -> float:
        return stage()

    with prefect_test_harness(server_startup_timeout=300):
        return float(measured())


def _of_a_run() -> list[Row]:
    """Return the mean time that the newest training run in the local store took to build a batch. Return no row if
    there is no such run."""
    import json

    histories = sorted(Path(".armature/store/train-vlm").glob("*/history.json"), key=lambda p: p.stat().st_mtime)
    if not histories:
        return []
    steps = json.loads(histories[-1].read_text())
    names = ("timing/wait_for_rollouts", "timing/batch", "timing/train", "timing/sync")
    if not steps or not all(name in steps[0] for name in names):
        return []
    whole = sum(step["timing/step"] for step in steps) / len(steps) * 1000
    batch = sum(step["timing/batch"] for step in steps) / len(steps) * 1000
    note = f"{len(steps)} steps of a real run: artifacts written, rollouts read, samples built"
    return [Row("building the batch of a step", batch, whole, "the whole step", "ms", "lower", note)]
