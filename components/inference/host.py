"""Hosts of model servers: this machine, or a node of a Ray cluster."""

from __future__ import annotations

import random
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil

from armature.components.contracts.errors import ServerError
from armature.components.machine.network import listener
from armature.components.machine.process import Program
from armature.components.machine.workers.placed import NodeActor, PlacedProgram, PlacementBundles, absolute

GIB = 2**30


@dataclass(frozen=True)
class ServerNeeds:
    """The requirements of a server, which its host checks before the start.

    Attributes:
        cache_gib: size of its KV cache in main memory, in GiB; None if the cache is in GPU memory.
        port: port to listen on; None: any free port.
    """

    name: str
    python: str
    model: str
    cache_gib: float | None
    port: int | None


class Host(Protocol):
    """A machine that runs one program at a time. The program ends when the process that holds this object ends."""

    @property
    def alive(self) -> bool:
        """True if the program runs. Does not block."""

    @property
    def ending(self) -> str:
        """Description of how the program ended, such as "with exit code 1"."""

    def prepare(self, needs: ServerNeeds) -> tuple[str, int]:
        """Check the machine, and return the address and the port for the server to listen on.

        Raises:
            ServerError: the machine lacks something that the server needs.
            ConfigurationError: there is no such machine.
        """

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str | None]) -> None:
        """Start a program after `prepare`; see `Program`. Raises OSError."""

    def stop(self) -> None:
        """End the program and all its processes, or cancel a `prepare` that waits."""

    def tail(self, lines: int) -> str:
        """Return the last `lines` lines of the program's log."""

    def free_gib(self) -> float:
        """Return the size of the machine's unused main memory in GiB."""

    def family(self) -> list[psutil.Process]:
        """Return the program's process, then its child processes; [] if they run on another machine."""


class LocalHost:
    """This machine as a `Host`. Nodes of a cluster use it too, for their own checks."""

    def __init__(self) -> None:
        self._program: Program | None = None

    @property
    def alive(self) -> bool:
        return self._program is not None and self._program.returncode is None

    @property
    def ending(self) -> str:
        return f"with exit code {self._program.returncode if self._program else None}"

    def prepare(self, needs: ServerNeeds) -> tuple[str, int]:
        model = Path(needs.model)
        if shutil.which(needs.python) is None:
            raise ServerError(
                "the environment with vLLM is missing", code="vllm_missing", where=needs.python, remedy=_SETUP
            )
        if not (model / "config.json").is_file():
            raise ServerError(
                "the model folder is not a checkpoint: it has no config.json",
                code="served_model_missing",
                where=needs.model,
                remedy="pass a folder with config.json",
            )
        if needs.cache_gib is not None:
            weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / GIB
            if needs.cache_gib + weights > (free := self.free_gib()):
                raise ServerError(
                    f"not enough memory: the server needs {needs.cache_gib:g} GiB of KV cache and {weights:.1f} GiB of "
                    f"weights, {free:.1f} GiB are free",
                    code="server_memory_missing",
                    where=needs.name,
                    remedy="lower machine.servers.environment.VLLM_CPU_KVCACHE_SPACE, or free memory",
                )
        return "127.0.0.1", free_port(needs.port, "127.0.0.1")

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str | None]) -> None:
        self._program = Program(command, log=log, env=env)

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop()

    def tail(self, lines: int) -> str:
        try:
            return self._program.tail(lines) if self._program else ""
        except OSError as error:
            return f"(the log cannot be read: {error})"

    def free_gib(self) -> float:
        return float(psutil.virtual_memory().available / GIB)

    def family(self) -> list[psutil.Process]:
        return self._program.family() if self._program else []


_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _TRIED = 20_000, 20
_SETUP = "make its environment: armature setup"


def _outside_connections() -> list[int]:
    """Return random port numbers below the range from which the kernel takes ports for outgoing connections. Return []
    if this range is unknown."""
    try:
        first = int(_CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []  # not Linux
    ports = range(_LOWEST, first)
    return random.SystemRandom().sample(ports, min(_TRIED, len(ports)))


def free_port(wanted: int | None, address: str) -> int:
    """Return `wanted` if it is free on `address`, or any free port if `wanted` is None.

    A port below the range that the kernel uses for outgoing connections is preferred. A server imports modules for 15 s
    before it listens, and meanwhile the kernel may give a port of that range to a connection.

    Raises:
        ServerError: `wanted` is in use.
    """
    for port in [*_outside_connections(), 0] if wanted is None else [wanted]:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                failure = error
            else:
                return int(probe.getsockname()[1])
    owner = listener(wanted or 0)
    raise ServerError(
        f"port {wanted} is in use{f' by {owner}' if owner else ''} ({failure.strerror})",
        code="server_port_in_use",
        where="machine.servers.arguments.port",
        remedy="end that program, choose another port, or leave the port out to get a free one",
    ) from failure


# --- Model servers on nodes of a Ray cluster ---


class PlacedHost:
    """A `Host` on a Ray cluster: the node that holds the server's placement bundle."""

    def __init__(self, places: PlacementBundles, index: int) -> None:
        self._gpus = places.bundle.gpus
        self._placed = PlacedProgram(places, index, _ServerNode, ServerError)

    @property
    def alive(self) -> bool:
        return self._placed.alive

    @property
    def ending(self) -> str:
        if self._placed.lost:
            return f"with its {self._placed.where}"
        return f"with exit code {self._placed.returncode}"

    def prepare(self, needs: ServerNeeds) -> tuple[str, int]:
        placed = self._placed
        with placed.starting() as stopped:
            placed.place(stopped)
            try:
                address, port = placed.ask("prepare", replace(needs, python=absolute(needs.python)))
            except ServerError as error:
                remedy = (
                    f"{error.remedy}. The node needs the model, machine.store and machine.servers.python at these paths"
                )
                raise ServerError(
                    error.what, code=error.code, where=f"{error.where}, {placed.where}", remedy=remedy
                ) from error
        return str(address), int(port)

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str | None]) -> None:
        if self._gpus:  # Ray has set CUDA_VISIBLE_DEVICES of the actor
            env = {key: value for key, value in env.items() if key != "CUDA_VISIBLE_DEVICES"}
        program, *arguments = command
        with self._placed.starting():
            self._placed.run("start", [absolute(program), *arguments], str(log.absolute()), dict(env))

    def stop(self) -> None:
        self._placed.stop()

    def tail(self, lines: int) -> str:
        return self._placed.tail(lines)

    def free_gib(self) -> float:
        return 0.0 if self._placed.lost else float(self._placed.ask("free_gib"))

    def family(self) -> list[psutil.Process]:
        return []


class _ServerNode(NodeActor):
    def prepare(self, needs: ServerNeeds) -> tuple[str, int]:
        LocalHost().prepare(needs)
        return self.address, free_port(needs.port, self.address)

    def free_gib(self) -> float:
        return LocalHost().free_gib()
