"""A node other than the first of a training on several."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

from armature.components.contracts.errors import ConfigurationError, TrainerError
from armature.components.training.links import broken, connect, unreachable
from armature.components.training.nodes import POLL, Attempt, Member, announced, start
from armature.components.training.service_settings import ServiceSettings

log = logging.getLogger(__name__)

FIRST_NODE = 600.0
"""Seconds that a node waits for the first one to begin."""
PATIENCE = 30.0
"""Seconds after a failure within which the first node may start once more, as the flow does."""


def join(job: Path) -> None:
    """Take part in the training of the file `job`, or in each that the folder `job` lists until it is removed.

    Raises:
        ConfigurationError: the file does not appear, or its training has one node.
        TrainerError: a training failed.
    """
    for file in announced(job) if job.is_dir() else [job]:
        _join(file)


def _join(file: Path) -> None:
    """Take part in every attempt of the training of `file`, until it ends on the first node.

    Between attempts, while the first node is down, and until it has begun, it waits.

    Raises:
        ConfigurationError: the file does not appear, or its training has one node.
        TrainerError: the training failed.
    """
    _wait_for(file)
    settings, joined = _read(file), 0
    while (attempt := _next(settings.workspace, joined)) is not None:
        settings, joined = _read(file), attempt.number
        _take_part(settings, attempt)


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + FIRST_NODE
    if not file.exists():
        log.warning("%s is not there yet; waiting %g s for the first node", file, FIRST_NODE)
    while not file.exists():
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"there is no such training, and none began within {FIRST_NODE:g} s",
                code="training_not_found",
                where=str(file),
                remedy="start the training on the first node; it says which file, which this one must see by that name",
            )
        time.sleep(POLL)


def _read(file: Path) -> ServiceSettings:
    settings = ServiceSettings.model_validate_json(file.read_text())
    if settings.processes.nodes == 1:
        raise ConfigurationError(
            "this training has one node",
            code="nothing_to_join",
            where=str(file),
            remedy="start it with machine.trainer_nodes = 2 or more",
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
            raise TrainerError("the training's folder is gone", code="training_removed", where=str(workspace))
        if newest is not None and newest.result == "done":
            return None
        if newest is not None and newest.result is None and newest.number > joined:
            return newest
        if newest is not None and newest.result == "failed":
            failed = failed or time.monotonic()
            if time.monotonic() >= failed + PATIENCE:
                raise TrainerError(
                    "the training failed",
                    code="joined_training_failed",
                    where=str(workspace),
                    remedy="the first node says why",
                )
        time.sleep(POLL)


def _take_part(settings: ServiceSettings, attempt: Attempt) -> None:
    """Until `attempt` ends, on the first node or because this one cannot continue, which the first is told."""
    link = _connected(settings, attempt)
    if link is None:
        return
    with link:
        member = Member.enter(settings, attempt, link)
        if member is None:
            nodes = settings.processes.nodes
            log.warning("all %d nodes of this training are there; waiting for one that is lost", nodes)
            return
        try:
            code = _train(settings, attempt, member, link)
        except BaseException as error:
            member.give_up(settings, attempt, str(error) or type(error).__name__)
            raise
        if code:
            member.give_up(settings, attempt, f"exit code {code}")


def _connected(settings: ServiceSettings, attempt: Attempt) -> socket.socket | None:
    """A connection to the first node; None when `attempt` is over. Until it can be reached, the reason is logged."""
    said = None
    while attempt.address is not None and Attempt.newest(settings.workspace) == attempt:
        try:
            return connect(attempt.address, settings.processes.node_timeout)
        except OSError as error:
            if str(error) != said:
                said = str(error)
                log.warning(unreachable(attempt.address, said))
        time.sleep(POLL)
    return None


def _train(settings: ServiceSettings, attempt: Attempt, member: Member, link: socket.socket) -> int:
    """The exit code of this node's processes; 0 when the attempt ended elsewhere."""
    # The network is the one over which the first node was reached, whatever its interface is called here.
    own = settings.processes.model_copy(update={"interface": member.address[0]})
    program = start(settings.model_copy(update={"processes": own}), attempt, member.number, log=None)
    try:
        while Attempt.newest(settings.workspace) == attempt:
            if (gone := broken(link)) is not None:
                log.warning("no connection to the first node: %s; waiting until it starts the processes again", gone)
                return 0
            if program.returncode not in (None, 0):
                return program.returncode
            time.sleep(POLL)
        return 0
    finally:
        program.stop()
