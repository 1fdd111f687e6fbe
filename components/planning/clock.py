"""A virtual clock: an event loop whose time jumps to its next timer, and units that run on it."""

from __future__ import annotations

import asyncio
import inspect
import selectors
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from armature.components.contracts.stages import ResultT

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Waits for nothing, as there is no file to wait for: it tells how long it would have waited."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never happens")
        self.waited += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is 0 at first and seconds pass at once. What runs on it has no files, threads or processes."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.waited

    def wait(self, seconds: float) -> None:
        """Let `seconds` pass; for who is not on the loop."""
        self.run_until_complete(asyncio.sleep(seconds))


class VirtualUnits:
    """Units of `run_loop`: one that waits by itself moves the clock; one that is a coroutine goes on beside others."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def submit(self, name: str, unit: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        made: Any = unit(*arguments)
        if inspect.iscoroutine(made):
            return _InFlight(self._loop, self._loop.create_task(made))
        future: Future[ResultT] = Future()
        future.set_result(made)
        return future


class _InFlight(Future[T]):
    def __init__(self, loop: VirtualLoop, task: asyncio.Task[T]) -> None:
        super().__init__()
        self._loop, self._task = loop, task

    def result(self, timeout: float | None = None) -> T:
        return self._loop.run_until_complete(self._task)


class SerialResource:
    """What does one thing at a time, in order, such as the event loop of a process. `busy`: seconds so far."""

    def __init__(self) -> None:
        self.busy, self._free_at = 0.0, 0.0

    def use(self, seconds: float) -> Awaitable[None]:
        """Return once it was had for `seconds`."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + seconds
        self.busy += seconds
        return asyncio.sleep(self._free_at - now)
