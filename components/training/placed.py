"""The ranks of a training on nodes of a Ray cluster, a bundle of a placement group for those of each node."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from armature.components.contracts.errors import TrainerError
from armature.components.machine.process import Program
from armature.components.machine.workers.placed import NodeActor, PlacedProgram, PlacementBundles
from armature.components.machine.workers.process import importable
from armature.components.training.service_settings import ServiceSettings

HOST = "ARMATURE_TRAINER_HOST"
"""The address on which rank 0 answers; without it, loopback."""


@dataclass(frozen=True)
class LostNode:
    """A node of the trainer that is gone: its number, from 0, and the reason, which names it."""

    number: int
    reason: str


def start(settings: ServiceSettings, attempt: Path, node: int, log: Path, env: Mapping[str, str]) -> Program:
    """Start the ranks of node 0 (the first), 1, ...

    Args:
        attempt: see `new_attempt`.

    Raises:
        ConfigurationError: this node has no such network interface, or a variable that `environment` names is not set.
    """
    service = ["-m", "armature.components.training.service", str(settings.file)]
    return settings.processes.start(service, rendezvous=attempt, node=node, log=log, env=env)


class PlacedRanks:
    """The processes of an attempt, started and ended together; to the client a `Program`.

    Args:
        attempt: see `new_attempt`.
        variables: those of `settings.processes.environment`, with the secrets of this machine.
        env: more variables.

    Raises:
        ConfigurationError: the cluster has no room, or a node has another code or no such network interface.
        TrainerError: a node was lost meanwhile.
    """

    def __init__(
        self,
        places: PlacementBundles,
        settings: ServiceSettings,
        attempt: Path,
        variables: Mapping[str, str],
        env: Mapping[str, str],
    ) -> None:
        self._code: int | None = None
        self._log = settings.workspace / "trainer.log"
        count = settings.processes.nodes
        self._nodes = [PlacedProgram(places, number, _TrainerNode, TrainerError) for number in range(count)]
        with ThreadPoolExecutor(count) as threads:
            placed = [threads.submit(_place, node) for node in self._nodes]
            try:
                for each in placed:
                    each.result()
                what = settings.model_dump_json(), str(attempt)
                for number, node in enumerate(self._nodes):
                    with node.starting():
                        node.run("start_ranks", *what, number, dict(variables), dict(env))
            except BaseException:
                self.stop()
                raise

    @property
    def returncode(self) -> int | None:
        """None while the ranks of all nodes run, or a node is lost; else of those that ended."""
        if self._code is None:
            codes = (node.returncode for node in self._nodes)
            self._code = next((code for code in codes if code is not None), None)
        return self._code

    def lost_node(self) -> LostNode | None:
        for number, node in enumerate(self._nodes):
            if node.lost:
                return LostNode(number, f"{node.where}: Ray has lost it")
        return None

    def stop(self) -> int:
        """End all of them. See `Program.stop`."""
        code = self.returncode
        with ThreadPoolExecutor(len(self._nodes)) as threads:
            list(threads.map(PlacedProgram.stop, self._nodes))
        self._code = -signal.SIGTERM if code is None else code
        return self._code

    def tail(self, lines: int = 30) -> str:
        """The last lines of the first node's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:]) if self._log.exists() else ""


def _place(node: PlacedProgram) -> None:
    with node.starting() as stopped:
        node.place(stopped)


class _TrainerNode(NodeActor):
    def start_ranks(
        self, settings: str, attempt: str, number: int, variables: dict[str, str], env: dict[str, str]
    ) -> None:
        """
        Args:
            settings: as JSON.
            number: of the node, from 0.
        """
        given = ServiceSettings.model_validate_json(settings)
        network = {"interface": given.processes.interface or self.address, "environment": importable() | variables}
        own = given.model_copy(update={"processes": given.processes.model_copy(update=network)})
        log = own.workspace / ("trainer.log" if number == 0 else f"trainer-{number}.log")
        self.program = start(own, Path(attempt), number, log, {HOST: self.address, **env})
