"""Disturbed runs, one after another, and what became of each."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from anyio.from_thread import start_blocking_portal

from armature.components.configuration import load_recipe
from armature.components.contracts.machine import Machine
from armature.components.inference.server import VllmServer
from armature.components.inference.settings import ServerSettings
from tests.chaos.faults import Fault, choose, inflict, small_disk
from tests.chaos.proxy import Proxy, proxied
from tests.chaos.training import OVERRIDES, RECIPE, Training, make_inputs

ATTEMPTS = 5
LIMIT = 900.0
"""Time limit in seconds for one run, with all its attempts."""
KEY = "a key for chaos"
NOT_OURS = "not an error of ours:"


@dataclass(frozen=True)
class Report:
    """The result of one disturbed run.

    `stops` has one entry for each attempt that ended with an error. `digest` is the digest of the final weights, or ""
    if the run did not finish. `passed` is True if they equal the weights of the undisturbed run.
    """

    seed: int
    joined: bool
    faults: tuple[str, ...]
    stops: tuple[str, ...]
    digest: str
    passed: bool
    seconds: float

    def __str__(self) -> str:
        form = "joined server" if self.joined else "own server"
        stops = f"; stopped: {' | '.join(self.stops)}" if self.stops else ""
        word = "same weights" if self.passed else f"FAILED ({self.digest or 'no weights'})"
        faults = "; ".join(self.faults) or "over before a fault"
        return f"seed {self.seed}, {form}: {faults}{stops} -> {word} ({self.seconds:.0f} s)"


class Chaos:
    """Disturbs runs. It starts the server that some runs join, makes the inputs of all runs, and does one run without
    disturbing it.

    Attributes:
        expected: digest of the undisturbed run's weights.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def __enter__(self) -> Self:
        os.environ.update(VLLM_API_KEY=KEY, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
        self._stack = ExitStack()
        try:
            self.inputs = make_inputs(self.folder / "inputs")
            self._proxy = self._stack.enter_context(proxied(self._serve()))
            self.expected = self._undisturbed()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _serve(self) -> str:
        recipe = load_recipe(RECIPE, OVERRIDES)
        settings, machine = recipe.sections["inference"], recipe.sections["machine"]
        assert isinstance(settings, ServerSettings) and isinstance(machine, Machine)
        server = VllmServer(settings, machine, index=0, log_folder=self.folder / "server", api_key=KEY)
        portal = self._stack.enter_context(start_blocking_portal())
        portal.call(server.start, self.inputs["model"])
        self._stack.callback(portal.call, server.stop)
        return server.url

    def _undisturbed(self) -> str:
        training = Training(self.folder / "undisturbed", self.inputs)
        if training.start().wait(LIMIT) != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{training.log.read_text()[-3000:]}")
        return training.weights_digest()

    def disturb(self, seed: int) -> Report:
        """Start a run, inflict faults on it, and start it again after each error, until it finishes or has failed too
        often. Return what happened.

        The faults follow from the seed, but their effect also depends on timing.
        """
        rng = random.Random(seed)
        joined = rng.random() < 0.6
        facts = (f'servers.endpoints=["{self._proxy.url}"]',) if joined else ()
        training = Training(self.folder / f"run-{seed}", self.inputs, facts)
        began, faults, stops = time.monotonic(), choose(rng, joined), list[str]()
        training.folder.mkdir(parents=True)
        with small_disk(training.store):
            done, passed = self._attempts(training, faults, stops, self._proxy if joined else None, began)
            digest = training.weights_digest() if passed else ""
        passed = passed and digest == self.expected
        report = Report(seed, joined, tuple(done), tuple(stops), digest, passed, time.monotonic() - began)
        if passed:
            shutil.rmtree(training.folder)
        return report

    def _attempts(
        self, training: Training, faults: list[Fault], stops: list[str], proxy: Proxy | None, began: float
    ) -> tuple[list[str], bool]:
        done, left = list[str](), list(faults)
        for _ in range(ATTEMPTS):
            written = training.log.stat().st_size if training.log.exists() else 0
            process = training.start()
            while left and process.poll() is None:
                output = inflict(left.pop(0), training, process, proxy)
                done += [output] if output else []
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            code = process.wait(max(1.0, LIMIT - (time.monotonic() - began)))
            if code == 0:
                return done, True
            psutil.wait_procs(children, timeout=20)
            stop = _stop(training.log.read_bytes()[written:].decode(errors="replace"), code)
            stops.append(stop)
            if stop.startswith(NOT_OURS):
                return done, False
        return done, False


def _stop(log: str, code: int) -> str:
    """Classify the end of an attempt: a kill that we injected, one of our errors (its first line), or a failure."""
    if code == -signal.SIGKILL:
        return "killed"
    _, ours, last = f"\n{log}".rpartition("\narmature: ")
    if code not in (1, 2) or "Traceback (most recent call last)" in last or not ours:
        return f"{NOT_OURS} exit code {code}: " + " / ".join(log.strip().splitlines()[-6:])
    return last.strip().splitlines()[0][:200]
