"""How long the threads of a run computed, and how long they waited for a CPU that others had."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil

Thread = tuple[int, int]


class CpuTimes:
    """Counts for this process and all that it started, since it was asked before.

    Linux's scheduler counts both for every thread (`schedstat`); elsewhere nothing is said.
    """

    def __init__(self) -> None:
        self._before = _thread_times()

    def since(self) -> dict[str, float]:
        """`timing/cpu`: seconds on a CPU; `timing/cpu_wait`: ready to run, and waiting for one. Threads add up; those
        that ended meanwhile are not counted."""
        before, self._before = self._before, _thread_times()
        pairs = [(times, before.get(thread, (0, 0))) for thread, times in self._before.items()]
        if not pairs:
            return {}
        ran, waited = (sum(now[part] - then[part] for now, then in pairs) / 1e9 for part in (0, 1))
        return {"timing/cpu": ran, "timing/cpu_wait": waited}


def _thread_times() -> Mapping[Thread, tuple[int, int]]:
    """Nanoseconds that each thread ran, and waited."""
    times: dict[Thread, tuple[int, int]] = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            try:
                ran, waited, _ = map(int, file.read_text().split())
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                continue
            times[process.pid, int(file.parent.name)] = ran, waited
    return times
