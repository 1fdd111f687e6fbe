"""Client of the trainer service: starts its processes, sends commands, and restarts it when it dies. Torch-free."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import StrictInt, StrictStr, TypeAdapter, ValidationError

from armature.components.artifacts.disk import write_file
from armature.components.contracts.errors import ArmatureError, TrainerError
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Events, not_sent
from armature.components.inference.replies import BadReply, exchange_blocking
from armature.components.machine.network import socket_options
from armature.components.machine.process import Program
from armature.components.machine.workers.placed import PlacementBundles
from armature.components.machine.workers.requests import ANYTHING
from armature.components.training.placed import LostNode, PlacedRanks, start
from armature.components.training.processes import error_file, new_attempt
from armature.components.training.service_settings import (
    TOKEN,
    TrainingSettings,
    read_error,
    rebuild,
    service_settings,
)

ResultT = TypeVar("ResultT")
FATAL = 500
"""HTTP status of an error reply after which the service ends."""
LARGEST_REPLY = 2**30
"""Largest reply in bytes; the largest ones are the log-probs of a whole batch."""
FLOATS, WHOLE, TEXT = TypeAdapter(dict[str, float]), TypeAdapter(StrictInt), TypeAdapter(StrictStr)
DEATH = 30.0
"""Seconds to wait for a service's processes to exit after the service dropped a connection."""
POLL = 0.05
"""Seconds between two checks of a process or a file."""
MAX_RESTARTS = 3
"""Number of restarts of a dead trainer during one call. If it dies once more, the call fails."""


class ServiceClient:
    """A trainer service that runs within the `with` block.

    Its ranks run on this machine or, with `machine.cluster.trainer`, on the nodes of a cluster.

    Args:
        training: the model and how it is trained.
        machine: processes, GPUs, threads and timeouts.
        workspace: a folder that outlives the service, with its checkpoints and its log.
        saved: called with the path of each checkpoint as soon as the service begins to write it.

    Every method raises the error that the service raised: a DataError for an unusable batch, a ConfigurationError for a
    command out of order, and a TrainerError with the traceback or the end of the log if the service failed or died.
    After an error `alive` tells if the service is still running.
    """

    def __init__(
        self,
        training: TrainingSettings,
        machine: Machine,
        workspace: Path,
        saved: Callable[[Path], None] = not_sent,
    ) -> None:
        self.machine = machine
        self.settings = service_settings(training, machine, workspace)
        self._saved = saved
        self._token = secrets.token_hex(32)
        cluster, bundle = machine.cluster, machine.trainer_bundle
        self._places = PlacementBundles(cluster, bundle, machine.trainer.nodes) if cluster and bundle else None
        self._program: Program | PlacedRanks | None = None
        self._attempt: Path | None = None
        self._lost: LostNode | None = None
        transport = httpx.HTTPTransport(socket_options=socket_options(machine.limits.node_timeout))
        headers = {"authorization": f"Bearer {self._token}"}
        self._http = httpx.Client(transport=transport, trust_env=False, headers=headers)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """True while the service's processes are running."""
        return self._program is not None and self._program.returncode is None

    def start(self) -> None:
        """Start the service and wait until it is ready.

        Raises:
            ArmatureError: the error that kept a rank from starting.
            TrainerError: the service died, or is not ready within `machine.limits.ready_timeout`; the message has the
                reason.
        """
        settings = self.settings
        settings.workspace.mkdir(parents=True, exist_ok=True)
        settings.address.unlink(missing_ok=True)
        write_file(settings.file, settings.model_dump_json(indent=1).encode())
        self._attempt, self._lost = new_attempt(settings.workspace), None
        self._program = self._started(self._attempt)
        deadline = time.monotonic() + self.machine.limits.ready_timeout
        while (url := read_address(settings.address)) is None:
            if not self.alive:
                raise self._died("the trainer service did not start")
            if time.monotonic() > deadline:
                error = self._died(f"the trainer service was not ready after {self.machine.limits.ready_timeout:g} s")
                self.stop()
                raise error
            time.sleep(POLL)
        self._http.base_url = httpx.URL(url)

    def restart(self) -> None:
        """Stop the remaining processes and start the service again on all nodes. Call `resume` afterwards."""
        self._end_processes()
        self.start()

    def stop(self) -> None:
        """End the service and all its processes."""
        self._end_processes()
        if self._places is not None:
            self._places.close()

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one, and return the number of steps that the weights contain."""
        return self._ask("resume", self.machine.limits.ready_timeout, WHOLE)

    def save(self) -> Path:
        """Start writing a checkpoint and return its path, which exists once it is complete; see `Checkpoints.save`."""
        checkpoint = Path(self._ask("save", self.machine.limits.train_timeout, TEXT))
        self._saved(checkpoint)
        return checkpoint

    def settle(self) -> None:
        """Wait until the checkpoint that `save` started is on the disk.

        Raises:
            TrainerError: it could not be written.
        """
        self._ask("settle", self.machine.limits.train_timeout, ANYTHING)

    def publish(self, folder: Path, version: int) -> None:
        """Write the weights after step `version` to `folder` in the Hugging Face layout, atomically.

        Raises:
            ConfigurationError: the trainer has another version of the weights.
        """
        self._ask("publish", self.machine.limits.train_timeout, ANYTHING, folder=str(folder.resolve()), version=version)

    def _train(self, step: int, **arguments: str) -> dict[str, float]:
        return self._ask("step", self.machine.limits.train_timeout, FLOATS, step=step, **arguments)

    def _ask(self, name: str, timeout: float, result: TypeAdapter[ResultT], **arguments: Any) -> ResultT:
        """Send a command to the service and return its validated result, or raise the service's error."""
        if not self.alive:
            raise self._died("the trainer service is not running")
        began = time.monotonic()
        try:
            command = {"name": name, **arguments}
            reply = exchange_blocking(self._http, "POST", "/command", {}, timeout, command, LARGEST_REPLY)
        except BadReply as error:
            raise TrainerError(
                f"the trainer's reply to {name!r} is not valid: {error.what}", code="invalid_trainer_reply"
            ) from error
        except httpx.TransportError as error:
            # httpx also reports a connection that the kernel gave up as a timeout, but before `timeout` has passed.
            if isinstance(error, httpx.ReadTimeout) and time.monotonic() - began >= timeout:
                raise TrainerError(
                    f"the trainer did not finish {name!r} within {timeout:g} s",
                    code="trainer_timeout",
                    where=str(self.settings.workspace / "trainer.log"),
                    remedy="send the same command again (a step is applied once), or raise the timeout in [machine]",
                ) from error
            self._wait_for_death()
            # Ray may take longer than this to notice that a node's network is gone: treat the node as lost.
            if self.alive and self._places is not None:
                self._lost = LostNode(0, f"the node of rank 0 does not answer at {self._http.base_url}: {error}")
                self._end_processes()
            raise self._died(f"the trainer died during {name!r}") from error
        if reply.status == FATAL:
            self._wait_for_death()
        try:
            document = reply.document
            if "error" not in document:
                return result.validate_python(document.get("result"))
            refused = rebuild(document["error"])
        except (BadReply, ValidationError) as cause:
            raise TrainerError(
                f"the trainer's reply to {name!r} is not valid: {cause}",
                code="invalid_trainer_reply",
                where=str(self.settings.workspace / "trainer.log"),
                remedy="start the run again; it resumes from the last checkpoint",
            ) from cause
        raise refused

    def _started(self, attempt: Path) -> Program | PlacedRanks:
        env = {TOKEN: self._token}
        if self._places is None:
            return start(self.settings, attempt, 0, self.settings.workspace / "trainer.log", env)
        ranks = PlacedRanks(self._places, self.settings, attempt, self.machine.trainer_variables(), env)
        Thread(target=self._watch, args=(ranks,), daemon=True).start()
        return ranks

    def _watch(self, ranks: PlacedRanks) -> None:
        """Watch all ranks, and stop all of them when a node is lost or the ranks of one node end.

        Otherwise the remaining ranks would wait for the missing ones forever.
        """
        while ranks.returncode is None and self._lost is None:
            if (lost := ranks.lost_node()) is not None:
                self._lost = lost
            time.sleep(POLL)
        ranks.stop()

    def _end_processes(self) -> None:
        if self._program is not None:
            self._program.stop()
            self._program = None

    def _wait_for_death(self) -> None:
        deadline = time.monotonic() + DEATH
        while self.alive and time.monotonic() < deadline:
            time.sleep(POLL)

    def _died(self, what: str) -> ArmatureError:
        """Return the error to raise for a service that died.

        It is the error that a rank wrote before it ended. If there is none, it is an error with the last lines of the
        log.
        """
        program, attempt, lost, settings = self._program, self._attempt, self._lost, self.settings
        ranks = range(settings.processes.ranks)
        if lost is not None:  # ranks of other nodes died because that node was gone
            what, count = f"{what}: {lost.reason}", settings.processes.processes
            ranks = range(lost.number * count, (lost.number + 1) * count)
        folder = attempt or settings.workspace
        errors = [(rank, error) for rank in ranks if (error := read_error(error_file(folder, rank))) is not None]
        if errors:
            # Prefer an error that is not a TrainerError: it is the cause, and the other ranks failed because of it.
            rank, document = min(errors, key=lambda one: isinstance(rebuild(one[1]), TrainerError))
            cause = rebuild(document)
            if not isinstance(cause, TrainerError):
                return cause
            return TrainerError(
                f"{what}: rank {rank}: {cause.what}",
                code=cause.code,
                where=str(document.get("traceback", "")),
                remedy=cause.remedy or "read trainer.log beside the checkpoints, then start the run again; it resumes",
            )
        if lost is not None:
            return TrainerError(
                what,
                code="node_lost",
                where=str(settings.workspace),
                remedy="start the run again; it resumes from the last checkpoint, on the nodes then in the cluster",
            )
        tail = program.tail() if program is not None else ""
        code = program.returncode if program is not None else None
        return TrainerError(
            f"{what} (exit code {code}); its log ends:\n{tail}",
            where=str(settings.workspace / "trainer.log"),
            remedy="start the run again; it resumes from the last checkpoint",
        )


def read_address(file: Path) -> str | None:
    """Return the URL that a service wrote to `file`; None if the file is missing or still incomplete."""
    try:
        document = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    url = document.get("url") if isinstance(document, dict) else None
    return url if isinstance(url, str) else None


def with_restarts(
    trainer: ServiceClient, done: int, ask: Callable[[], ResultT], replay: Callable[[int], object], events: Events
) -> ResultT:
    """Call `ask` and return its result, restarting the trainer if it dies meanwhile.

    Args:
        done: number of the step whose weights `ask` needs.
        replay: function that applies the step with a given number again. A restarted trainer resumes from its newest
            checkpoint; the steps up to `done` that the checkpoint lacks are replayed.

    Raises:
        TrainerError: the trainer failed but is still running, or it died `MAX_RESTARTS` + 1 times.
    """
    restarts = 0
    while True:
        try:
            if restarts:
                trainer.restart()
                for step in range(trainer.resume() + 1, done + 1):
                    replay(step)
            return ask()
        except TrainerError as error:
            if trainer.alive or restarts == MAX_RESTARTS:
                raise
            events.message(f"the trainer died after step {done}; starting it again\n{error}")
            restarts += 1


def run_steps(
    trainer: ServiceClient,
    steps: int,
    begin: Callable[[], object],
    one_step: Callable[[int], object],
    out: Path,
    events: Events,
) -> None:
    """Train from the newest checkpoint up to step `steps`, and publish the final weights to `out`.

    Args:
        begin: called before step 1, in a run that does not resume.
        one_step: makes the step with the given number (1, 2, ...), and saves a checkpoint when one is due. After a
            restart it is called again for steps that the checkpoint lacks.

    Raises:
        TrainerError: the trainer refuses a command, or dies more than `MAX_RESTARTS` times.
    """
    done = trainer.resume()
    if done:
        events.message(f"resuming after step {done}")
    else:
        with_restarts(trainer, 0, begin, one_step, events)
    for step in range(done + 1, steps + 1):
        with_restarts(trainer, step - 1, partial(one_step, step), one_step, events)
    with_restarts(trainer, steps, lambda: trainer.publish(out, steps), one_step, events)
    trainer.settle()
