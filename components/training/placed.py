"""The trainer's ranks on the nodes of a Ray cluster: one bundle of a placement group for the ranks of each node."""

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
"""Environment variable with the address on which rank 0 listens; if unset, loopback."""


@dataclass(frozen=True)
class LostNode:
    """A cluster node of the trainer that was lost."""

    number: int
    """The node's number within the training, from 0."""
    reason: str
    """A phrase for the error message that names the node and says how the loss was noticed."""


def start(settings: ServiceSettings, attempt: Path, node: int, log: Path, env: Mapping[str, str]) -> Program:
    """Start the ranks of node `node` (0, 1, ...) on this machine.

    Args:
        attempt: the folder through which the ranks of all nodes connect; see `new_attempt`.

    Raises:
        ConfigurationError: this machine does not have the network interface, or a variable that `environment` refers to
            is not set.
    """
    service = ["-m", "armature.components.training.service", str(settings.file)]
    return settings.processes.start(service, rendezvous=attempt, node=node, log=log, env=env)


class PlacedRanks:
    """All ranks of one start of the trainer, on several nodes. They start and end together.

    The client uses it like a `Program`, the process of a trainer on one machine.

    Args:
        attempt: the folder through which the ranks connect; see `new_attempt`.
        variables: the variables of `settings.processes.environment`, with the secrets of this machine resolved.
        env: further environment variables.

    Raises:
        ConfigurationError: the cluster has no room, or a node has other code or lacks the network interface.
        TrainerError: a node was lost during the start.
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
                document = settings.model_dump_json()
                for number, node in enumerate(self._nodes):
                    with node.starting():
                        node.run("start_ranks", document, str(attempt), number, dict(variables), dict(env))
            except BaseException:
                self.stop()
                raise

    @property
    def returncode(self) -> int | None:
        """Exit code of the first node whose ranks ended. None while all nodes run, and also if a node was lost."""
        if self._code is None:
            codes = (node.returncode for node in self._nodes)
            self._code = next((code for code in codes if code is not None), None)
        return self._code

    def lost_node(self) -> LostNode | None:
        """Return the first node that Ray has lost, if any."""
        for number, node in enumerate(self._nodes):
            if node.lost:
                return LostNode(number, f"{node.where}: Ray has lost it")
        return None

    def stop(self) -> int:
        """End the ranks of all nodes and return the exit code; see `Program.stop`."""
        code = self.returncode
        with ThreadPoolExecutor(len(self._nodes)) as threads:
            list(threads.map(PlacedProgram.stop, self._nodes))
        self._code = -signal.SIGTERM if code is None else code
        return self._code

    def tail(self, lines: int = 30) -> str:
        """Return the last lines of the first node's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:]) if self._log.exists() else ""


def _place(node: PlacedProgram) -> None:
    with node.starting() as stopped:
        node.place(stopped)


class _TrainerNode(NodeActor):
    def start_ranks(
        self, settings: str, attempt: str, number: int, variables: dict[str, str], env: dict[str, str]
    ) -> None:
        """Start the ranks of this node.

        Args:
            settings: `ServiceSettings` as JSON.
            number: the node's number, from 0.
        """
        service = ServiceSettings.model_validate_json(settings)
        network = {"interface": service.processes.interface or self.address, "environment": importable() | variables}
        service = service.model_copy(update={"processes": service.processes.model_copy(update=network)})
        log = service.workspace / ("trainer.log" if number == 0 else f"trainer-{number}.log")
        self.program = start(service, Path(attempt), number, log, {HOST: self.address, **env})
