"""A node other than the first of a training on several."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

from components.contracts.errors import ConfigurationError, TrainerError
from components.process import Program
from components.training.nodes import Attempt, NodeRank, start
from components.training.service_settings import ServiceSettings

log = logging.getLogger(__name__)

POLL = 0.5
PATIENCE = 30.0
"""Seconds after a failure within which the first node may start once more, as the flow does."""


def join(file: Path) -> None:
    """Take part in every attempt of the training of `file`, until it ends on the first node.

    Between attempts, and while the first node is down, it waits.

    Raises:
        ConfigurationError: no such file, or its training has one node.
        TrainerError: the training failed.
    """
    if not file.exists():
        raise ConfigurationError(
            "there is no such training",
            where=str(file),
            remedy="start the training on the first node; it says which file, which this node must see by that name",
        )
    settings, joined = _read(file), 0
    while (attempt := _next(settings.workspace, joined)) is not None:
        settings, joined = _read(file), attempt.number
        _take_part(settings, attempt)


def _read(file: Path) -> ServiceSettings:
    settings = ServiceSettings.model_validate_json(file.read_text())
    if settings.processes.nodes == 1:
        raise ConfigurationError(
            "this training has one node", where=str(file), remedy="start it with machine.trainer_nodes = 2 or more"
        )
    return settings


def _next(workspace: Path, joined: int) -> Attempt | None:
    """The attempt after number `joined`, as soon as there is one; None when the training is done.

    Raises:
        TrainerError: there will be none.
    """
    failed = None
    while True:
        newest = Attempt.newest(workspace)
        if newest is None and joined:
            raise TrainerError("the training's folder is gone", where=str(workspace))
        if newest is not None and newest.result == "done":
            return None
        if newest is not None and newest.result is None and newest.number > joined:
            return newest
        if newest is not None and newest.result == "failed":
            failed = failed or time.monotonic()
            if time.monotonic() >= failed + PATIENCE:
                raise TrainerError("the training failed", where=str(workspace), remedy="the first node says why")
        time.sleep(POLL)


def _take_part(settings: ServiceSettings, attempt: Attempt) -> None:
    """Until the first node ends `attempt`; if it ends here before, the first node is told."""
    place, program, over = NodeRank.take(settings, attempt), None, False
    if place is None:
        log.warning("all %d nodes of this training are there; waiting for one that is lost", settings.processes.nodes)
        return
    try:
        program = start(settings, attempt, place.number, log=None)
        while Attempt.newest(settings.workspace) == attempt:
            if program.returncode not in (None, 0):
                break
            place.live()
            time.sleep(POLL)
        else:
            over = True
    finally:
        if program is not None:
            program.stop()
        if not over:
            _say_lost(settings, attempt, program)


def _say_lost(settings: ServiceSettings, attempt: Attempt, program: Program | None) -> None:
    code = "not started" if program is None else f"exit code {program.returncode}"
    attempt.lost(settings.workspace).write_text(f"node {socket.gethostname()}: {code}")
