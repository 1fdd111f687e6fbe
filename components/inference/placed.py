"""Model servers on nodes of a Ray cluster: bundles of a placement group, and an actor in each that guards a server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from components.contracts.cluster import ClusterSettings, ServerBundle
from components.contracts.errors import ArmatureError, ConfigurationError, ServerError
from components.inference.host import LocalHost, ServerNeeds, free_port
from components.process import GRACE
from components.workers.actor import installed, joined, refuse_other

ANSWER_SECONDS = 30.0
"""For an actor that is there to do what takes no time."""


class ServerPlaces:
    """A placement group with a bundle for each of `servers`; a server beyond these has a group of its own while it
    runs. When a node is lost, Ray looks for room for its bundles on the others."""

    def __init__(self, cluster: ClusterSettings, bundle: ServerBundle, servers: int) -> None:
        self.cluster, self.bundle, self._servers = cluster, bundle, servers
        self._lock = threading.Lock()
        self._groups = dict[int, Any]()

    def take(self, index: int) -> tuple[Any, int]:
        """The group and the bundle in it of server `index`."""
        from ray.util.placement_group import placement_group

        shared = index < self._servers
        with self._lock:
            key = 0 if shared else index
            if key not in self._groups:
                bundles = [self.bundle.resources_of_node()] * (self._servers if shared else 1)
                self._groups[key] = placement_group(bundles, strategy=self.bundle.strategy)
            return self._groups[key], index if shared else 0

    def give_back(self, index: int) -> None:
        """What a server beyond `servers` had, which has ended."""
        if index >= self._servers:
            self._remove(index)

    def close(self) -> None:
        for key in list(self._groups):
            self._remove(key)

    def _remove(self, key: int) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with self._lock:
            group = self._groups.pop(key, None)
        if group is not None and ray.is_initialized():
            remove_placement_group(group)


class PlacedHost:
    """A `Host`: the node that has the server's bundle. Each `prepare` makes an actor there, `stop` ends it."""

    def __init__(self, places: ServerPlaces, index: int) -> None:
        self._places, self._index = places, index
        self._actor: Any = None
        self._ends: Any = None
        self._stopped = threading.Event()
        self.node = ""
        """The address of the node where it was last."""

    @property
    def alive(self) -> bool:
        return self._ends is not None and not _ray().wait([self._ends], timeout=0)[0]

    @property
    def ending(self) -> str:
        ray = _ray()
        try:
            return str(ray.get(self._ends)) if self._ends is not None else "before it was started"
        except ray.exceptions.RayError:
            return f"with its node, {self.node}"

    def prepare(self, needs: ServerNeeds) -> tuple[str, int]:
        self._stopped = stopped = threading.Event()
        ray = joined(self._places.cluster.address)
        try:
            about = self._placed(ray, stopped)
            self.node = about["node"]
            refuse_other(about, "machine.cluster.servers")
            needs = replace(needs, python=_absolute(needs.python))
            address, port = _answer(ray, self._actor.prepare.remote(needs))
        except ray.exceptions.RayError as error:
            self.stop()
            raise ServerError(f"its node was lost while it was started: {error}", where=self._where) from error
        except ServerError as error:
            self.stop()
            remedy = f"{error.remedy}. Models, machine.store and machine.server_python are read on the node"
            raise ServerError(error.what, where=f"{error.where}, {self._where}", remedy=remedy) from error
        except BaseException:
            self.stop()
            raise
        return str(address), int(port)

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str | None]) -> None:
        ray, actor = _ray(), self._actor
        if self._places.bundle.tensor_parallel_size:  # Ray has said to the actor which GPUs are its own
            env = {key: value for key, value in env.items() if key != "CUDA_VISIBLE_DEVICES"}
        try:
            program, *arguments = command
            _answer(ray, actor.start.remote([_absolute(program), *arguments], str(log.absolute()), dict(env)))
        except ray.exceptions.RayError as error:
            raise ServerError(f"its node was lost while it was started: {error}", where=self._where) from error
        self._ends = actor.wait.remote()

    def stop(self) -> None:
        self._stopped.set()
        actor, ends, self._actor, self._ends = self._actor, self._ends, None, None
        if actor is not None and (ray := _ray()).is_initialized():
            with suppress(ray.exceptions.RayError):
                if ends is not None:
                    ray.get(actor.stop.remote(), timeout=2 * GRACE)
                ray.kill(actor)
        self._places.give_back(self._index)

    def tail(self, lines: int) -> str:
        ray = _ray()
        try:
            return str(_answer(ray, self._actor.tail.remote(lines))) if self._actor is not None else ""
        except ray.exceptions.RayError:
            return f"(its log is on node {self.node}, which is gone)"

    def free_gib(self) -> float:
        ray = _ray()
        try:
            return float(_answer(ray, self._actor.free_gib.remote()))
        except ray.exceptions.RayError:
            return 0.0

    def family(self) -> list[psutil.Process]:
        return []

    @property
    def _where(self) -> str:
        return f"node {self.node}" if self.node else "machine.cluster"

    def _placed(self, ray: Any, stopped: threading.Event) -> dict[str, Any]:
        """Make the actor; what its node says of itself, once there is room.

        Raises:
            ConfigurationError: there is none, or the nodes cannot make the actor.
            ServerError: it was stopped meanwhile.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, place = self._places.take(self._index)
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=place)
        options = self._places.bundle.options() | {"scheduling_strategy": strategy}
        end = time.monotonic() + self._places.cluster.start_timeout
        while True:
            # One call waits for the program's end while others are answered.
            self._actor = ray.remote(_Node).options(**options, max_restarts=0, max_concurrency=4).remote()
            about = self._actor.about.remote()
            while not ray.wait([about], timeout=1.0)[0]:
                self._refuse_waiting(ray, stopped, end)
            try:
                found: dict[str, Any] = ray.get(about)
                return found
            except ray.exceptions.RayActorError as error:
                if error.actor_init_failed:
                    raise ConfigurationError(
                        f"the cluster cannot start model servers: {error}",
                        where=f"machine.cluster.address = {self._places.cluster.address!r}",
                        remedy="install the same release of Armature on each node, or start them from the same image",
                    ) from error
            # For a moment the bundle may still be on a node that was lost.
            self._refuse_waiting(ray, stopped, end)
            stopped.wait(1.0)

    def _refuse_waiting(self, ray: Any, stopped: threading.Event, end: float) -> None:
        if stopped.is_set():
            raise ServerError("stopped before it was started", where="machine.cluster")
        if time.monotonic() > end:
            free = {key: value for key, value in ray.available_resources().items() if "node:" not in key}
            raise ConfigurationError(
                f"no node of the cluster had room for a model server within "
                f"{self._places.cluster.start_timeout:g} s: it takes {self._places.bundle.resources_of_node()}, "
                f"free on all nodes together: {free}",
                where="machine.cluster.servers",
                remedy="add nodes, lower machine.servers, or let a server take less",
            )


class _Node:
    """In the bundle: the server's program, which ends with the actor that has it."""

    def __init__(self) -> None:
        from ray.util import get_node_ip_address

        self._host, self._address = LocalHost(), get_node_ip_address()

    def about(self) -> dict[str, Any]:
        return {"node": self._address, **installed()}

    def prepare(self, needs: ServerNeeds) -> tuple[str, int]:
        self._host.prepare(needs)
        return self._address, free_port(needs.port, self._address)

    def start(self, command: list[str], log: str, env: dict[str, str | None]) -> None:
        self._host.start(command, Path(log), env)

    def wait(self) -> str:
        while self._host.alive:
            time.sleep(0.2)
        return self._host.ending

    def stop(self) -> None:
        self._host.stop()

    def tail(self, lines: int) -> str:
        return self._host.tail(lines)

    def free_gib(self) -> float:
        return self._host.free_gib()


def _answer(ray: Any, reference: Any) -> Any:
    """Raises the error of ours that the node raised, or a RayError."""
    try:
        return ray.get(reference, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ArmatureError | OSError):
            raise error.cause from None
        raise


def _absolute(program: str) -> str:
    """A path that means the same in another folder; a bare name is looked up on PATH, on the node."""
    return os.path.abspath(program) if os.sep in program else program  # noqa: PTH100 (a link must not be resolved)


def _ray() -> Any:
    import ray

    return ray
