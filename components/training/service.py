"""The trainer service: a long-lived process group that trains, scores, publishes and saves when asked over HTTP.

Started by `armature.components.training.client` as `python -m armature.components.training.service settings.json`, once
per rank. Rank 0 answers on loopback, on a node of a cluster on its address; every command runs on all ranks, one at a
time. A command that cannot be carried out is refused before anything changes; an error after that ends the service, for
the weights may be half-way, and the next one starts from a checkpoint.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from armature.components.artifacts.disk import write_file
from armature.components.contracts.errors import ArmatureError
from armature.components.garbage import exempt_from_collection
from armature.components.training.errors import FatalServiceError, describe, rebuild
from armature.components.training.frontend import HttpFrontend
from armature.components.training.launch import joined
from armature.components.training.placed import HOST
from armature.components.training.processes import RENDEZVOUS, error_file
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import WORKERS, ServiceSettings
from armature.components.training.service_worker import Command, ServiceWorker

TOKEN = "ARMATURE_TRAINER_TOKEN"
IDLE = 30.0
"""Seconds without a command after which the ranks make sure of each other."""
FIRST_STEPS = 3
"""They compile layers and make the optimizer's states, which are many objects that stay."""
KEEPS_STATE = ("score", "save", "settle", "publish", "send", "probe", "measure")
"""Commands that change nothing in the trainer: when one fails on all ranks alike, the service continues."""


def main(settings_file: str) -> None:
    """Run until told to stop. The exit code is 1 if an error ended it."""
    settings = ServiceSettings.model_validate_json(Path(settings_file).read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with ExitStack() as group:
        try:
            ranks = group.enter_context(joined(settings.processes, settings.seed))
            serve(imported_worker(settings.worker)(settings, ranks), settings, ranks)
        except BaseException as error:
            rendezvous = Path(os.environ[RENDEZVOUS]).parent
            error_file(rendezvous, int(os.environ["RANK"])).write_text(json.dumps(describe(error)))
            raise


def imported_worker(name: str) -> Callable[[ServiceSettings, Ranks], ServiceWorker]:
    """What `WORKERS` has under that name. Garbage is not looked for meanwhile, nor later in what was imported."""
    gc.disable()
    try:
        worker: Callable[[ServiceSettings, Ranks], ServiceWorker] = WORKERS[name]
    finally:
        gc.freeze()
        gc.enable()
    return worker


def serve(worker: ServiceWorker, settings: ServiceSettings, ranks: Ranks) -> None:
    """Take commands, one at a time, until "stop"."""
    host = os.environ.get(HOST, "127.0.0.1")
    front = HttpFrontend(os.environ[TOKEN], worker.recorded, host) if ranks.first else None
    if front is not None:
        write_file(settings.address, json.dumps({"url": front.start()}).encode())
    idle = min(IDLE, ranks.timeout.total_seconds() / 4)
    answer: Future[Any] | None = None
    steps = 0
    try:
        while True:
            # The others do not wait for longer than a collective may take: without a command, they hear that.
            own, answer = (front and front.next(idle)) or (None, None)
            command = ranks.broadcast(own)
            if command is None:
                continue
            if command["name"] == "stop":
                if answer is not None:
                    answer.set_result(None)
                return
            carry_out(worker, command, answer, ranks)
            if command["name"] == "step" and steps < FIRST_STEPS:
                steps += 1
                exempt_from_collection()
    except BaseException as error:
        if answer is not None and not answer.done():
            answer.set_exception(FatalServiceError(error))
        raise
    finally:
        if front is not None:
            front.stop()


def carry_out(worker: ServiceWorker, command: Command, answer: Future[Any] | None, ranks: Ranks) -> None:
    """Check on all ranks, then run on all ranks; `answer` is rank 0's."""
    prepared: Any = None
    refused: Exception | None = None
    try:
        prepared = worker.check(command)
    except Exception as error:  # of whatever kind: nothing has changed
        refused = error
    first_refusal = next((error for error in ranks.gather(describe(refused) if refused else None) if error), None)
    if first_refusal is not None:
        if answer is not None:
            answer.set_exception(rebuild(first_refusal))
        return
    try:
        result = worker.run(command, prepared)
    except BaseException as error:
        survives = ranks.size == 1 and command["name"] in KEEPS_STATE and isinstance(error, ArmatureError)
        if answer is not None:
            answer.set_exception(error if survives else FatalServiceError(error))
        if survives:
            return
        raise
    if answer is not None:
        answer.set_result(result)


if __name__ == "__main__":
    main(sys.argv[1])
