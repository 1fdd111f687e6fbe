"""`armature drill`: a run that is left alone, and disturbed runs that have to end with the same weights."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path

from anyio.from_thread import start_blocking_portal

from armature.check import check_ahead
from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.inference.server import VllmServer
from armature.components.inference.settings import ServerSettings
from armature.components.machine.process import Program
from armature.components.machine.project import project
from armature.drill.faults import CUT, FILL, KINDS, Fault, can_mount, choose, fill_disk, signal_everywhere, small_disk
from armature.drill.proxy import Proxy
from armature.drill.runs import DrilledRun, first_difference, make_inputs, short_overrides

ATTEMPTS = 5
JOINS = 0.6
"""Share of the runs that join a server of the drill, through its proxy."""
SPARE = 64 * 2**20
"""Bytes by which the small disk of a run is larger than the files of the undisturbed run."""
UNDISTURBED = "undisturbed"
NOT_OURS = "not an error of ours:"

say = partial(print, flush=True)


class Drill:
    """Runs a recipe without disturbing it, and then disturbs further runs.

    Args:
        overrides: changes of the recipe's values, after those that cut it short.
        minutes: time limit for everything.
        stack: closed by the caller. It ends the server that some runs join.

    Attributes:
        untouched: what could be disturbed and no fault has hit so far.
    """

    def __init__(self, recipe: str, overrides: Sequence[str], folder: Path, minutes: float, stack: ExitStack) -> None:
        self.recipe, self.folder = recipe, folder.absolute()
        self.overrides = (*short_overrides(recipe), *overrides)
        self.loaded = load_recipe(recipe, [*self.overrides, f'machine.store="{self.folder / "inputs"}"'])
        self._end, self._stack = time.monotonic() + 60 * minutes, stack
        self._proxy: Proxy | None = None
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["VLLM_API_KEY"] = secrets.token_hex(16)

    def leave_alone(self) -> None:
        """Make the inputs of all runs, and do one run without disturbing it. Find out what can be disturbed.

        Raises:
            ArmatureError: the recipe cannot run here.
        """
        with project(self.loaded.folder):
            check_ahead(self.loaded)
            self.inputs = make_inputs(self.loaded)
        cluster, kinds = self.loaded.machine.cluster, {"run"}
        run = self._undisturbed = DrilledRun(self.folder / UNDISTURBED, self.recipe, self.overrides, self.inputs)
        with run.running() as program:
            while self._wait(3.0, program):
                kinds.update(kind for kind in KINDS if kind not in kinds and signal_everywhere(cluster, run.mark, kind))
        if program.returncode != 0:
            raise ArmatureError(
                f"the undisturbed run failed: {_stop(run.log.read_text(errors='replace'), program.returncode)}",
                code="undisturbed_run_failed",
                where=str(run.log),
                remedy="make the recipe run here first: `armature check`, `armature run`",
            )
        say(f"undisturbed: {run.steps_done()} steps, with the processes {', '.join(sorted(kinds))}")
        left_out = {kind: "the run has no such process" for kind in KINDS if kind not in kinds}
        if cluster is not None:
            left_out |= dict.fromkeys((CUT, FILL), "nodes of a cluster do not see the proxy and the small disk")
        if "inference" not in self.loaded.sections:
            left_out[CUT] = "the run has no model server"
        if not can_mount():
            left_out[FILL] = "only root can mount a small disk for it"
        for what, reason in left_out.items():
            say(f"left out: {what}: {reason}")
        self._possible = [each for each in (*KINDS, CUT, FILL) if each not in left_out]
        self.untouched = set(self._possible)

    def draw(self, seed: int) -> tuple[bool, list[Fault]]:
        """Return the faults that follow from a seed, and True if the run joins a server of the drill."""
        rng, possible = random.Random(seed), list(self._possible)
        joins = CUT in possible and rng.random() < JOINS
        if CUT in possible:
            possible.remove("server" if joins else CUT)  # a joined server is not the run's own
        return joins, choose(rng, possible, self._undisturbed.steps_done())

    def disturb(self, name: str, joins: bool, faults: list[Fault]) -> str:
        """Start a run, inflict faults on it, and start it again after each error, until it finishes or has failed too
        often.

        Returns:
            A sentence about the first difference from the undisturbed run, or "" if the run has the same results.

        Raises:
            ArmatureError: the time is over.
        """
        began, more = time.monotonic(), (f'machine.servers.endpoints=["{self._join().url}"]',) if joins else ()
        run = DrilledRun(self.folder / name, self.recipe, (*self.overrides, *more), self.inputs)
        used = sum(file.stat().st_size for file in self._undisturbed.folder.rglob("*") if file.is_file())
        fills = any(fault.action == "fill" for fault in faults)
        with small_disk(run.store, used + SPARE) if fills else nullcontext():
            difference = "it did not finish"
            if self._finish(run, list(faults)):
                difference = first_difference(run.results(), self._undisturbed.results())
            if difference and fills:
                shutil.copytree(run.store, run.folder / "copy-of-store")
        if not difference:
            shutil.rmtree(run.folder)
        say(f"{name}: {difference or 'same weights as undisturbed'} ({time.monotonic() - began:.0f} s)")
        return difference

    def _join(self) -> Proxy:
        """Return the proxy of the server that runs join, which the first call starts."""
        if self._proxy is None:
            settings, folder = self.loaded.sections["inference"], self.folder / "server"
            assert isinstance(settings, ServerSettings)
            key = os.environ["VLLM_API_KEY"]
            server = VllmServer(settings, self.loaded.machine, index=0, log_folder=folder, api_key=key)
            portal = self._stack.enter_context(start_blocking_portal())
            portal.call(server.start, self.inputs["model"])
            self._stack.callback(server.end)
            self._proxy = self._stack.enter_context(closing(Proxy(server.url)))
        return self._proxy

    def _finish(self, run: DrilledRun, faults: list[Fault]) -> bool:
        """Inflict the faults on a run, and start it again after each error of ours. Return True if it finishes."""
        for _ in range(ATTEMPTS):
            written = run.log.stat().st_size if run.log.exists() else 0
            with run.running() as program:
                while faults and program.returncode is None:
                    self._inflict(faults.pop(0), run, program)
                while self._wait(60.0, program):
                    pass
            if program.returncode == 0:
                return True
            stop = _stop(run.log.read_bytes()[written:].decode(errors="replace"), program.returncode)
            say(f"{run.folder.name}: stopped: {stop}")
            if stop.startswith(NOT_OURS):
                break
        return False

    def _inflict(self, fault: Fault, run: DrilledRun, program: Program) -> None:
        """Wait for the time of a fault, unless the run ends before, and inflict it."""
        while run.steps_done() < fault.step and self._wait(0.05, program):
            pass
        if not self._wait(fault.delay, program):
            return
        hit = partial(signal_everywhere, self.loaded.machine.cluster, run.mark, fault.victim)
        struck: list[tuple[str, int]] = []
        if fault.action == "fill":
            fill_disk(run.store / ".ballast")
        elif fault.action == "cut":
            self._join().cut()
        elif fault.action == "pause":
            struck = sorted(hit(signal.SIGSTOP))
        elif struck := sorted(hit())[:1]:
            hit(signal.SIGKILL, struck[0])
        missing = fault.victim in KINDS and not struck
        hits = ["no such process runs"] if missing else [f"process {pid} on {host}" for host, pid in struck]
        say(f"{run.folder.name}: {', '.join([str(fault), *hits])}")
        self.untouched -= set() if missing else {fault.victim}
        try:
            if fault.action != "kill":
                self._wait(fault.seconds, program)
        finally:  # also if the time is over: otherwise processes on a cluster would stay paused
            if fault.action == "fill":
                (run.store / ".ballast").unlink(missing_ok=True)
            elif fault.action == "cut":
                self._join().restore()
            elif fault.action == "pause":
                hit(signal.SIGCONT)

    def _wait(self, seconds: float, program: Program) -> bool:
        """Sleep for `seconds`, or until the program ends. Return True if it still runs."""
        until = time.monotonic() + seconds
        while program.returncode is None and time.monotonic() < until:
            if time.monotonic() > self._end:
                raise ArmatureError(
                    "the time is over",
                    code="drill_time_over",
                    where=str(self.folder),
                    remedy="read run.log of the last run there: it may hang; or give more --minutes",
                )
            time.sleep(0.05)
        return program.returncode is None


def _stop(log: str, code: int | None) -> str:
    """Classify the end of an attempt: a kill that we injected, one of our errors (its first line), or a failure."""
    if code == -signal.SIGKILL:
        return "killed"
    _, ours, last = f"\n{log}".rpartition("\narmature: ")
    if code not in (1, 2) or "Traceback (most recent call last)" in last or not ours:
        return f"{NOT_OURS} exit code {code}: " + " / ".join(log.strip().splitlines()[-6:])
    return last.strip().splitlines()[0][:200]


def drill(recipe: str, overrides: Sequence[str], folder: Path | None, runs: int, seed: int, minutes: float) -> None:
    """Disturb `runs` runs and print what happens. A folder that this call makes is removed, unless a run fails.

    Raises:
        ConfigurationError: the recipe cannot run here, or the folder has the runs of another drill.
        ArmatureError: a run differs from the undisturbed one, or the time is over.
    """
    if folder is not None and (folder / UNDISTURBED).exists():  # a finished run would not run again
        raise ConfigurationError(
            "the folder has the runs of another drill",
            code="drill_folder_used",
            where=str(folder),
            remedy="remove it, or give another --folder",
        )
    made = folder is None or not folder.exists()
    folder = folder or Path(tempfile.mkdtemp(prefix="armature-drill-"))
    say(f"in {folder}")
    failed, error = dict[int, str](), False
    try:
        with ExitStack() as stack:
            drilled = Drill(recipe, overrides, folder, minutes, stack)
            drilled.leave_alone()
            for each in range(seed, seed + runs):
                if difference := drilled.disturb(f"run-{each}", *drilled.draw(each)):
                    failed[each] = difference
            if drilled.untouched:
                say(f"not disturbed, more --runs would: {', '.join(sorted(drilled.untouched))}")
    except Exception:  # After an interruption the folder is removed.
        error = (folder / UNDISTURBED).exists()
        raise
    finally:
        if made and not failed and not error:
            shutil.rmtree(folder, ignore_errors=True)
    for number, difference in failed.items():
        raise ArmatureError(
            f"{len(failed)} of {runs} runs differ from the undisturbed one; the first one: {difference}",
            code="drill_difference",
            where=f"{folder}/run-{number}",
            remedy=f"compare it with {folder}/{UNDISTURBED}; --seed {number} --runs 1 repeats its faults",
        )
