"""What the loop and its units cost per step when generating, training and syncing take no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.table import Row, alternate, seconds

STEPS = 100


class NoWork:
    """Steps whose units return at once."""

    def rollouts(self, step: int) -> Any:
        return step

    def batch(self, step: int, rollouts: Any) -> Any:
        return step

    def train(self, step: int, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}

    def sync(self, version: int) -> None: ...

    def record(self, step: int, metrics: dict[str, float]) -> None: ...


class Silent:
    """Events that nobody reads."""

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def metrics(self, values: Any, step: int) -> None: ...

    def artifact(self, artifact: Any, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None: ...


def measure() -> list[Row]:
    from components.rl.loop import run_loop
    from components.stages import ThreadUnits

    def bare() -> float:
        def work() -> None:
            steps = NoWork()
            for step in range(1, STEPS + 1):
                steps.record(step, steps.train(step, steps.batch(step, steps.rollouts(step))))
                steps.sync(step)

        return seconds(work) / STEPS * 1000

    def threads() -> float:
        return seconds(lambda: run_loop(NoWork(), 1, STEPS, 0, ThreadUnits(), Silent())) / STEPS * 1000

    bare_ms, threads_ms = alternate(5, bare, threads)
    rows = [
        Row("a step, units on threads", threads_ms, bare_ms, "bare loop", "ms", "lower"),
        Row("a step, units as Prefect tasks", _prefect(), threads_ms, "threads", "ms", "lower"),
    ]
    return rows + _of_a_run()


def _prefect() -> float:
    """Milliseconds per step with PrefectUnits, on a server of its own that is up before the clock starts."""
    from prefect import flow, task
    from prefect.testing.utilities import prefect_test_harness

    from components.rl.loop import run_loop
    from tasks.units import PrefectUnits

    @task
    def stage() -> float:
        with PrefectUnits() as units:
            return seconds(lambda: run_loop(NoWork(), 1, STEPS, 0, units, Silent())) / STEPS * 1000

    @flow
    def measured() -> float:
        return stage()

    with prefect_test_harness():
        return float(measured())


def _of_a_run() -> list[Row]:
    """From the newest training run in the local store, if there is one: what is neither waiting nor computing."""
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
