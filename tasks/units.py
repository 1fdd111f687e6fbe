"""Units of a long stage as Prefect task runs, so that each shows on the run's page with its times and its error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from armature.components.contracts.stages import ResultT


class PrefectUnits:
    """Runs each unit on a thread of its own, as a task nested in the task that submits it.

    Results travel in our futures and not through Prefect: a unit may return a batch of gigabytes, and Prefect
    holds on to what a task returned until the flow ends.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(8, thread_name_prefix="unit")

    def submit(self, name: str, unit: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        """Run `unit(*arguments)`; the task is named after `name` without its number, the task run after `name`."""
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
            except BaseException as error:  # a stop of the flow, or Prefect itself: nobody may wait for ever
                if not future.done():
                    future.set_exception(error)

        self._executor.submit(copy_context().run, carry)
        return future

    def __enter__(self) -> PrefectUnits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nobody waits: a unit may be waiting for a server that is being stopped.
        self._executor.shutdown(wait=kind is None, cancel_futures=True)
