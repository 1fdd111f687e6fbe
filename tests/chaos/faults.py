"""Faults that are injected into a run, and their times, drawn from a seed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.proxy import Proxy
from tests.chaos.training import STEPS, Training, children, is_server, is_trainer

Victims = Callable[[subprocess.Popen[bytes]], list[psutil.Process]]
VICTIMS: dict[str, Victims] = {
    "server": lambda process: children(process, is_server),
    "trainer": lambda process: children(process, is_trainer),
    "run": lambda process: [psutil.Process(process.pid)],
}
DISK = "96m"


@dataclass(frozen=True)
class Fault:
    """One fault of a run, which begins `delay` seconds after the training step `step` is done.

    `kind` is "kill" or "pause" (a process of the `victim`), "fill" (the disk), or "cut" (the connections to a joined
    server). All but "kill" last for `seconds`.
    """

    kind: str
    victim: str
    step: int
    delay: float
    seconds: float

    def __str__(self) -> str:
        whom = f" {self.victim}" if self.victim else ""
        held = "" if self.kind == "kill" else f" for {self.seconds:.1f} s"
        return f"{self.kind}{whom} {self.delay:.1f} s after step {self.step}{held}"


def choose(rng: random.Random, joined: bool) -> list[Fault]:
    """Return one to three random faults, in the order of their times.

    If the run joins a server, the server belongs to somebody else: it is not killed or paused, but connections to it
    are cut.
    """
    victims = ["trainer", "run"] if joined else ["server", "trainer", "run"]
    kinds = [("kill", each) for each in victims] + [("pause", each) for each in victims]
    kinds += [("cut", "")] * 2 if joined else []
    kinds += [("fill", "")] if can_mount() else []
    chosen = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
    faults = [
        Fault(kind, victim, rng.randrange(STEPS), rng.uniform(0, 0.6), rng.uniform(1, 8)) for kind, victim in chosen
    ]
    return sorted(faults, key=lambda fault: (fault.step, fault.delay))


def wait(seconds: float, process: subprocess.Popen[bytes], condition: Callable[[], bool] = lambda: False) -> bool:
    """Sleep for `seconds`, or until the condition is true or the run `process` has ended. Return True if the run has
    not ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition() and process.poll() is None:
        time.sleep(0.05)
    return process.poll() is None


def inflict(fault: Fault, training: Training, process: subprocess.Popen[bytes], proxy: Proxy | None) -> str:
    """Wait for the time of a fault and inflict it on a run. Return a description of the fault, or "" if the run ended
    before or had no such process."""
    due = wait(600, process, lambda: training.steps_done() >= fault.step) and wait(fault.delay, process)
    if not due:
        return ""
    if fault.kind == "fill":
        with full(training.store):
            wait(fault.seconds, process)
        return str(fault)
    if fault.kind == "cut":
        assert proxy is not None
        proxy.cut()
        wait(fault.seconds, process)
        proxy.restore()
        return str(fault)
    victims = VICTIMS[fault.victim](process)
    if fault.kind == "kill":
        _signal(victims[:1], signal.SIGKILL)
    else:
        _signal(victims, signal.SIGSTOP)
        wait(fault.seconds, process)
        _signal(victims, signal.SIGCONT)
    return str(fault) if victims else ""


def _signal(victims: list[psutil.Process], number: signal.Signals) -> None:
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(number)


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Make `folder` a small disk of its own, which `full` can fill, while the block runs. If this user may not mount
    disks, make it a plain folder."""
    folder.mkdir(parents=True)
    mounted = can_mount() and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]).returncode == 0
    )
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill the disk that is mounted at `folder`, to the last byte, while the block runs. Do nothing if `folder` is on
    the machine's own disk."""
    ballast = folder / ".ballast"
    if not folder.is_mount():
        yield
        return
    try:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**20))
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(b"0")
        yield
    finally:
        ballast.unlink(missing_ok=True)
