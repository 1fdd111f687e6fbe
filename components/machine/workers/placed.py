"""Programs on nodes of a Ray cluster. Each runs in a bundle of a placement group, where an actor guards it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from armature.components.contracts.cluster import Bundle, ClusterSettings
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.machine.process import GRACE, Program
from armature.components.machine.workers.actor import installed, joined, not_started, refuse_other

ANSWER_SECONDS = 30.0
"""Seconds for a running actor to answer a call that does no work."""


class PlacementBundles:
    """A placement group with `count` bundles. If a node is lost, Ray moves its bundles to other nodes with room."""

    def __init__(self, cluster: ClusterSettings, bundle: Bundle, count: int) -> None:
        self.cluster, self.bundle, self._count = cluster, bundle, count
        self._lock = threading.Lock()
        self._group: Any = None

    def take(self) -> Any:
        """Return the placement group, which the first call creates."""
        from ray.util.placement_group import placement_group

        with self._lock:
            if self._group is None:
                bundles = [self.bundle.resources_of_node()] * self._count
                self._group = placement_group(bundles, strategy=self.bundle.strategy)
            return self._group

    def wanted(self) -> str:
        """Describe the resources that the group waits for, and the number of nodes."""
        each, strategy = self.bundle.resources_of_node(), self.bundle.strategy
        if self._count == 1:
            return f"{each} of a node"
        if strategy == "STRICT_SPREAD":
            return f"{each} of each of {self._count} different nodes, as its strategy is {strategy}"
        on = f" of one node, as its strategy is {strategy}" if strategy == "STRICT_PACK" else ""
        return f"{self._count} times {each}{on}"

    def close(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with self._lock:
            group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            remove_placement_group(group)


class PlacedProgram:
    """A program on the node of a bundle. Each call of `place` creates an actor there, and `stop` ends it.

    Args:
        actor: its class, which says how the program is started.
        failed: the class of the error for a node that is lost, or `stop`, before the program runs.
    """

    def __init__(
        self, places: PlacementBundles, index: int, actor: type[NodeActor], failed: Callable[..., ArmatureError]
    ) -> None:
        self._places, self._index, self._class, self._failed = places, index, actor, failed
        self._actor: Any = None
        self._ends: Any = None
        self._stopped = threading.Event()
        self.node = ""
        """Address of the node on which the program ran last."""

    @property
    def alive(self) -> bool:
        return self._ends is not None and self._ending is None

    @property
    def returncode(self) -> int | None:
        """The exit code of a program that has ended; None if it runs, was stopped, or was lost with its node."""
        code = self._ending
        return code if isinstance(code, int) else None

    @property
    def lost(self) -> bool:
        """True if the node is lost, and the program with it."""
        return self._ending == "lost"

    @property
    def _ending(self) -> int | Literal["lost"] | None:
        ray, ends = _ray(), self._ends
        if ends is None or not ray.wait([ends], timeout=0)[0]:
            return None
        try:
            return int(ray.get(ends))
        except ray.exceptions.RayError:
            return "lost"

    @property
    def where(self) -> str:
        return f"node {self.node}" if self.node else "machine.cluster"

    @contextmanager
    def starting(self) -> Iterator[threading.Event]:
        """Stop the program if the block raises. The yielded event is set when another thread stops the program.

        If the node is lost, the error of `failed` is raised.
        """
        stopped = self._stopped
        ray = joined(self._places.cluster.address)
        try:
            yield stopped
        except ray.exceptions.RayError as error:
            self.stop()
            raise self._failed(f"its node was lost while it was started: {error}", where=self.where) from error
        except BaseException:
            self.stop()
            raise

    def place(self, stopped: threading.Event) -> None:
        """Create the actor as soon as there is room; `stopped` is the event that `starting` yields.

        Raises:
            ConfigurationError: there is no room, or the nodes cannot create the actor or have other code.
            ArmatureError: the error of `failed`, because the program was stopped in the meantime.
        """
        about = self._about(_ray(), stopped)
        self._refuse_stopped(stopped)
        self.node = about["node"]
        refuse_other(about, self._places.bundle.SETTING)

    def run(self, method: str, *arguments: Any) -> None:
        """Call the actor's `method`, which starts the program. Raises the errors of `ask`."""
        self.ask(method, *arguments)
        self._ends = self._actor.wait.remote()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor. Raises the ArmatureError that the node raised, or a RayError."""
        ray = _ray()
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=ANSWER_SECONDS)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ArmatureError | OSError):
                raise error.cause from None
            raise

    def stop(self) -> None:
        stopped, self._stopped = self._stopped, threading.Event()
        stopped.set()
        actor, ends, self._actor, self._ends = self._actor, self._ends, None, None
        if actor is not None and (ray := _ray()).is_initialized():
            with suppress(ray.exceptions.RayError):
                if ends is not None:
                    ray.get(actor.stop.remote(), timeout=2 * GRACE)
                ray.kill(actor)

    def tail(self, lines: int) -> str:
        ray = _ray()
        try:
            return str(self.ask("tail", lines)) if self._actor is not None else ""
        except ray.exceptions.RayError:
            return f"(its log is on node {self.node}, which is gone)"

    def _about(self, ray: Any, stopped: threading.Event) -> dict[str, Any]:
        """The facts that the actor reports about its node."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._refuse_stopped(stopped)
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._places.take(), placement_group_bundle_index=self._index
        )
        options = self._places.bundle.options() | {"scheduling_strategy": strategy}
        end = time.monotonic() + self._places.cluster.start_timeout
        while True:
            # One call waits for the program's end while others are answered.
            self._actor = ray.remote(self._class).options(**options, max_restarts=0, max_concurrency=4).remote()
            about = self._actor.about.remote()
            while not ray.wait([about], timeout=1.0)[0]:
                self._refuse_waiting(ray, stopped, end)
            try:
                facts: dict[str, Any] = ray.get(about)
                return facts
            except ray.exceptions.RayActorError as error:
                if error.actor_init_failed:
                    raise not_started(self._places.bundle.WHAT, self._places.cluster.address, error) from error
            # For a moment the bundle may still be on a node that was lost.
            self._refuse_waiting(ray, stopped, end)
            stopped.wait(1.0)

    def _refuse_stopped(self, stopped: threading.Event) -> None:
        if stopped.is_set():
            raise self._failed("stopped before it was started", where="machine.cluster")

    def _refuse_waiting(self, ray: Any, stopped: threading.Event, end: float) -> None:
        self._refuse_stopped(stopped)
        alive = [node for node in ray.nodes() if node["Alive"]]
        # A driver whose own raylet died is not ended by Ray, and nothing that it asks for is ever placed.
        if ray.get_runtime_context().get_node_id() not in {node["NodeID"] for node in alive}:
            raise self._failed("the Ray node that this run is on was lost", where="machine.cluster")
        if time.monotonic() > end:
            bundle = self._places.bundle
            free = {key: value for key, value in ray.available_resources().items() if "node:" not in key}
            raise ConfigurationError(
                f"the cluster had no room for {bundle.WHAT} within {self._places.cluster.start_timeout:g} s: that "
                f"takes {self._places.wanted()}; {large_enough(alive, bundle)} of {len(alive)} nodes have "
                f"so much while nothing runs on them, free on all nodes together: {free}",
                code="no_room_in_cluster",
                where=bundle.SETTING,
                remedy="add nodes, start fewer, let it take less, or choose another strategy",
            )


def large_enough(nodes: Sequence[Mapping[str, Any]], bundle: Bundle) -> int:
    """Return how many of `nodes`, in Ray's listing, have enough resources for a bundle when they are idle."""
    each = bundle.resources_of_node()
    return sum(all(node["Resources"].get(name, 0) >= amount for name, amount in each.items()) for node in nodes)


class NodeActor:
    """The Ray actor in a bundle. It owns a program, which ends together with the actor."""

    def __init__(self) -> None:
        from ray.util import get_node_ip_address

        self.address = get_node_ip_address()
        self.program: Program | None = None

    def about(self) -> dict[str, Any]:
        return {"node": self.address, **installed()}

    def start(self, command: list[str], log: str, env: Mapping[str, str | None]) -> None:
        self.program = Program(command, log=Path(log), env=env)

    def wait(self) -> int:
        assert self.program is not None
        return self.program.wait()

    def stop(self) -> None:
        if self.program is not None:
            self.program.stop()

    def tail(self, lines: int) -> str:
        try:
            return self.program.tail(lines) if self.program is not None else ""
        except OSError as error:
            return f"(the log cannot be read: {error})"


def absolute(program: str) -> str:
    """Return a path that is valid in any folder. A name without a folder is looked up on PATH, on the node."""
    return os.path.abspath(program) if os.sep in program else program  # noqa: PTH100 (a link must not be resolved)


def _ray() -> Any:
    import ray

    return ray
