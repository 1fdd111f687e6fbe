"""Inputs over all doors, with limits of time and memory, and a table of what came of them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.doors import DOORS, Door

ROOT = Path(__file__).parents[2]
OPENING = 120.0
"""Seconds that a door's process may take from its start to its first input."""
FINDINGS = ("silent", "raw", "memory", "hang", "died")


@dataclass
class Result:
    """Results of all inputs of one door. `counts` are the numbers of inputs by result. A finding has the number of its
    input, its kind and its details."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, number: int, kind: str, detail: str, seconds: float) -> None:
        self.counts[kind] += 1
        self.slowest = max(self.slowest, seconds)
        if kind in FINDINGS:
            self.findings.append((number, kind, detail))


class Worker:
    """A process that runs the inputs of a door. `lines` are the lines of its output, and `errors` the last lines of its
    error output."""

    def __init__(self, name: str, seed: str, first: int, stop: int) -> None:
        command = [sys.executable, "-m", "tests.fuzz.worker", name, seed, str(first), str(stop)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, errors="replace")
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._drain, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = [*self.errors[-30:], line]

    def next(self, timeout: float) -> dict[str, Any] | None:
        """Wait for the next line of output and return its document; None if the process has ended. Raises queue.Empty
        after `timeout` seconds."""
        line = self.lines.get(timeout=timeout)
        return None if line is None else dict(json.loads(line))


@contextmanager
def running(name: str, seed: str, first: int, stop: int) -> Iterator[Worker]:
    worker = Worker(name, seed, first, stop)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


def fuzz_door(name: str, seed: str, inputs: range, until: float) -> Result:
    """Run the inputs of a door that can be begun before the clock reads `until`. A worker that hangs or dies is
    replaced."""
    result, door, number = Result(), DOORS[name], inputs.start
    while number < inputs.stop and time.monotonic() < until:
        with running(name, seed, number, inputs.stop) as worker:
            number = _follow(worker, door, number, result, until)
    return result


def _follow(worker: Worker, door: Door, number: int, result: Result, until: float) -> int:
    """Add a worker's results to `result` until it is done, hangs, dies or runs out of time. Return the number of the
    next input."""
    limit, began, begun = OPENING, time.monotonic(), False
    while True:
        try:
            line = worker.next(limit)
        except queue.Empty:
            result.add(number, "hang", f"no result in {limit:g} s" if begun else "the door did not open", limit)
            return number + 1
        if line is None:
            if begun or worker.process.wait() != 0:
                result.add(number, "died", "".join(worker.errors[-12:]), 0.0)
                number += 1
            return number
        if "begin" in line:
            limit, began, begun = door.seconds, time.monotonic(), True
            continue
        result.add(number, line["kind"], line["detail"], time.monotonic() - began)
        number, begun = number + 1, False
        if time.monotonic() > until:
            return number


def table(results: dict[str, Result]) -> str:
    head = f"{'door':<14}{'inputs':>8}{'accepted':>10}{'refused':>9}{'findings':>10}{'slowest':>10}"
    rows = [
        f"{name:<14}{result.counts.total():>8}{result.counts['accepted']:>10}{result.counts['refused']:>9}"
        f"{len(result.findings):>10}{result.slowest:>8.1f} s"
        for name, result in results.items()
    ]
    total = sum(result.counts.total() for result in results.values())
    matches = sum(len(result.findings) for result in results.values())
    return "\n".join([head, *rows, f"{total} inputs, {matches} findings"])
