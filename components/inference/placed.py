"""Model servers on nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from armature.components.contracts.errors import ServerError
from armature.components.inference.host import LocalHost, ServerNeeds, free_port
from armature.components.workers.placed import NodeActor, PlacedProgram, PlacementBundles, absolute


class PlacedHost:
    """A `Host`: the node that has the server's bundle."""

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
                remedy = f"{error.remedy}. Models, machine.store and machine.server_python are read on the node"
                raise ServerError(
                    error.what, code=error.code, where=f"{error.where}, {placed.where}", remedy=remedy
                ) from error
        return str(address), int(port)

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str | None]) -> None:
        if self._gpus:  # Ray has said to the actor which GPUs are its own
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
