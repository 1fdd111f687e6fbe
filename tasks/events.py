"""Report a stage's progress, metrics and artifacts to Prefect's page of the run and to MLflow while it runs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, cast
from uuid import UUID

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run, task_run

from armature.components.configuration.stages import ProgressLines, TerminalEvents
from armature.components.contracts.errors import TrackingError
from armature.components.contracts.stages import Artifact, ResultT
from armature.tasks.patience import patience
from armature.tasks.prometheus import RUNS, ResourceWatch, free_bytes
from armature.tasks.tracking import TrackedRun


class PrefectUnits:
    """Runs the units of a long stage as nested Prefect tasks, so that each has its times and its error on the run's
    page.

    Each unit runs on a thread of its own. Its result is returned through a future of ours, not through Prefect: a unit
    may return gigabytes, and Prefect keeps what a task returned until the flow ends.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(8, thread_name_prefix="unit")

    def submit(self, name: str, unit: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        """Start `unit(*arguments)` as a task run called `name`, and return its future.

        The task is called like its runs without the number at the end: the run collect-3 belongs to the task collect.
        """
        future: Future[ResultT] = Future()

        def work() -> None:
            try:
                future.set_result(unit(*arguments))
            except BaseException as error:
                future.set_exception(error)
                raise

        kind = name.rpartition("-")[0] or name
        run = task(name=kind, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)(work)

        def carry() -> None:
            try:
                run(return_state=True)
            except BaseException as error:  # the flow was stopped, or Prefect failed: nobody may wait forever
                if not future.done():
                    future.set_exception(error)

        self._executor.submit(copy_context().run, carry)
        return future

    def __enter__(self) -> PrefectUnits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error we do not wait for the units: one may be waiting for a server that is being stopped.
        self._executor.shutdown(wait=kind is None, cancel_futures=True)


FLUSH_SECONDS = 3.0
"""Seconds after which collected events are sent."""
"""Seconds between two log lines about the same progress bar."""


@dataclass
class _Bar:
    """The state of a progress bar, and the Prefect artifact that shows it."""

    done: int
    total: int
    postfix: Mapping[str, float]
    changed: bool = True
    artifact: UUID | None = None

    def text(self, name: str) -> str:
        """Return the state of the bar `name` as one line of text."""
        return " ".join([f"{name} {self.done}/{self.total}", *(f"{k}={v:.4g}" for k, v in self.postfix.items())])


class PrefectEvents:
    """The `Events` of one stage run, used as a context manager inside the task.

    Reporting never waits for a server: a thread sends the collected events every few seconds. While MLflow does not
    answer, metrics are kept and sent again. At the end of the stage we wait for MLflow, and it is an error if it does
    not come back. If the stage itself failed, its own error is raised.

    Args:
        run: the MLflow run of the stage.
        reported: receives the steps and the artifact digests that were reported.
        store: folder whose disk is watched for free space.
    """

    def __init__(self, run: TrackedRun, reported: set[str | int], store: Path) -> None:
        self._run, self._reported, self._store = run, reported, store
        self._resources, self._stack = ResourceWatch(), ExitStack()
        self._log: logging.Logger | logging.LoggerAdapter[logging.Logger] = get_run_logger()
        self._terminal = TerminalEvents() if sys.stderr.isatty() else None
        self._lines = ProgressLines()
        self._lock, self._stop = Lock(), Event()
        self._bars: dict[str, _Bar] = {}
        self._metrics: list[tuple[str, float, int, int]] = []
        self._artifacts: list[tuple[Artifact, str, int | None]] = []
        self._thread = Thread(target=copy_context().run, args=(self._send_until_stopped,), daemon=True)

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        with self._lock:
            bar = self._bars.setdefault(name, _Bar(done, total, postfix))
            bar.done, bar.total, bar.postfix, bar.changed = done, total, postfix or bar.postfix, True
        self._numbers.progress(name, done, total)
        if self._terminal:
            self._terminal.progress(name, done, total, **postfix)
        elif (line := self._lines.line(name, done, total, postfix)) is not None:
            self._say(line)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        with self._lock:
            self._reported.add(step)
            self._metrics.extend((key, float(value), now, step) for key, value in values.items())
        self._numbers.of_step(values, step)

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None:
        with self._lock:
            self._reported.add(artifact.digest)
            self._artifacts.append((artifact, role, step))

    def message(self, text: str) -> None:
        self._say(text)

    def __enter__(self) -> PrefectEvents:
        self._numbers = self._stack.enter_context(RUNS.stage(flow_run.name, task_run.name))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._stack.close()
        if self._terminal:
            self._terminal.close()
        if error is None:
            self._send()
            return
        try:
            with patience(0.0):
                self._send()
        except TrackingError as lost:
            self._log.warning("%d metrics did not reach MLflow: %s", len(self._metrics), lost)

    def _say(self, text: str) -> None:
        """Write a line to the run's log, with the number of the latest step for logs in JSON."""
        self._log.info(text, extra={"step": self._numbers.step})  # seen where logs are JSON

    def _send_until_stopped(self) -> None:
        """Send the collected events every few seconds, and warn if disk or memory is low, until the stage ends."""
        away = False
        while not self._stop.wait(FLUSH_SECONDS):
            for warning in self._resources.warnings(free_bytes(self._store)):
                self._log.warning(warning)
            try:
                with patience(0.0):
                    self._send()
                if away:
                    self._log.warning("MLflow answers again; the kept metrics were sent")
                away = False
            except TrackingError as error:
                if not away:
                    self._log.warning("the run continues and keeps its metrics until MLflow answers: %s", error)
                away = True

    def _send(self) -> None:
        """Send progress bars to Prefect, and metrics and artifacts to MLflow. Events that fail to arrive are kept."""
        self._send_bars()
        with self._lock:
            metrics, artifacts = list(self._metrics), list(self._artifacts)
        self._run.log_metrics(metrics)
        with self._lock:
            del self._metrics[: len(metrics)]
        self._run.log_artifacts(artifacts)
        with self._lock:
            del self._artifacts[: len(artifacts)]

    def _send_bars(self) -> None:
        """Send the progress bars that have changed to Prefect's page of the run."""
        with self._lock:
            changed = [(name, bar) for name, bar in self._bars.items() if bar.changed]
            for _, bar in changed:
                bar.changed = False
        for name, bar in changed:
            percent = 100.0 * bar.done / max(bar.total, 1)
            if bar.artifact is None:
                bar.artifact = cast(UUID, create_progress_artifact(percent, description=bar.text(name)))
            else:
                update_progress_artifact(bar.artifact, progress=percent, description=bar.text(name))
