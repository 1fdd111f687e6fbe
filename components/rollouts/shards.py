"""Collect rollouts with worker processes, on this machine or on nodes of a cluster.

Workers write shards to the artifact store; this process receives only references to them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.episodes import Task
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine, MachineLimits, MachineWorkers
from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory
from armature.components.contracts.stages import Events
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.direct_access import SuspectServer
from armature.components.inference.pool import ServerPool
from armature.components.machine.project import VARIABLE as PROJECT
from armature.components.machine.project import project_folder
from armature.components.machine.workers.channel import WorkerError
from armature.components.machine.workers.pool import WorkerPool
from armature.components.machine.workers.requests import NOTHING, ReplyForm
from armature.components.machine.workers.worker import Worker, make_worker
from armature.components.rollouts.collect import CollectionProgress, failures_said
from armature.components.rollouts.settings import RolloutSettings
from armature.components.rollouts.table import read_rollouts
from armature.components.rollouts.worker import ALIVE_EVERY, SHARDS, WorkerPlan

ShardT = TypeVar("ShardT")
WorkerT = TypeVar("WorkerT")


class ShardQueue(Generic[ShardT, WorkerT]):
    """The shards of a step: waiting for a worker, being played, or late. All calls must come from one event loop.

    Attributes:
        late: shards that were taken from their worker. A shard is taken at most once, because it may just be long.
    """

    def __init__(self, shards: Sequence[ShardT]) -> None:
        self._waiting = deque((shard, 1) for shard in shards)
        self._left, self._idle = len(shards), 0
        self._changed = asyncio.Condition()
        self._played = dict[WorkerT, tuple[ShardT, float]]()
        self.late = list[ShardT]()

    async def take(self) -> tuple[ShardT, int] | None:
        """Wait for a shard that no worker plays. Return it with the number of the attempt, which starts at 1. Return
        None once all shards are done."""
        async with self._changed:
            self._idle += 1
            try:
                await self._changed.wait_for(lambda: self._waiting or not self._left)
            finally:
                self._idle -= 1
            return self._waiting.popleft() if self._waiting else None

    async def put_back(self, shard: ShardT, attempt: int) -> None:
        """Put a failed shard back into the queue. Its next attempt has the number `attempt`."""
        async with self._changed:
            self._waiting.append((shard, attempt))
            self._changed.notify_all()

    async def made(self) -> None:
        """Record that one shard is done."""
        async with self._changed:
            self._left -= 1
            self._changed.notify_all()

    @contextmanager
    def played(self, shard: ShardT, worker: WorkerT, now: float) -> Iterator[None]:
        """Record that `worker` plays `shard` while the block runs. It began at the time `now`, in seconds."""
        self._played[worker] = shard, now
        try:
            yield
        finally:
            del self._played[worker]

    def overdue(self, now: float, awaited: float, timeout: float) -> Iterator[tuple[ShardT, WorkerT]]:
        """Yield late shards with their workers, the shard that was begun first at the front. Yield at most one shard
        for each idle worker.

        A shard is late if it has been played for `timeout` seconds, and training has waited for it for `timeout`
        seconds. `now` is the current time, and `awaited` is the time since which training waits. A yielded shard is
        added to `late`.
        """
        overdue = [
            (begun, worker, shard)
            for worker, (shard, begun) in self._played.items()
            if shard not in self.late and now - max(begun, awaited) >= timeout
        ]
        for _, worker, shard in sorted(overdue, key=lambda each: each[0])[: self._idle]:
            self.late.append(shard)
            yield shard, worker


WORKER = "armature.components.rollouts.worker"
SILENCE = 120.0
"""Seconds without a message after which a worker counts as lost. A running worker sends a message every 5 s."""

MOST_SIGNS = round(7 * 86400 / ALIVE_EVERY)
"""Limit on the messages that a worker may send while it plays one shard. At one message every 5 s they last for a
week."""

MOST_BYTES = 2**24
"""Largest accepted reply of a worker, in bytes. A reply does not contain rollouts, so it is small."""

PAUSE = 1.0
"""Seconds to wait before a failed shard is tried again, so that the pool can restart its servers."""

ATTEMPTS = 4
"""Limit on the attempts to collect a shard. The error of the last attempt ends the run."""

LOOK_EVERY = 1.0
"""Seconds between two searches for late shards."""


class SuspectReply(ReplyForm):
    """The fields of a `SuspectServer`, in a worker's reply."""

    name: str
    weights_id: str
    reason: str


class ShardReply(ReplyForm):
    """A worker's reply about one shard.

    Attributes:
        made: True if the shard is stored; False if all servers were gone.
        suspects: the servers that failed requests.
    """

    made: bool
    suspects: list[SuspectReply]


SHARD_REPLY = TypeAdapter(ShardReply)


@dataclass(frozen=True)
class RolloutShard:
    """Consecutive groups of a step, one for each of its `tasks`. The first one has the number `first_group`."""

    step: int
    first_group: int
    tasks: tuple[Task, ...]

    def __str__(self) -> str:
        last = self.first_group + len(self.tasks) - 1
        return f"the shard of step {self.step}, groups {self.first_group} to {last},"

    @property
    def name(self) -> str:
        return f"{self.step:05d}-{self.first_group:04d}-{len(self.tasks):04d}"


class RolloutWorkers:
    """A pool of `machine.workers.rollouts` worker processes, each with its own environment, HTTP client and image
    store.

    Args:
        run: fingerprint of the run. The keys of the run's shards in the store begin with it.
    """

    def __init__(
        self,
        plan: RolloutSettings,
        environment: EnvironmentSettings,
        pool: ServerPool,
        store: ArtifactStore,
        machine: Machine,
        run: str,
    ) -> None:
        self._plan, self._pool, self._store, self._run = plan, pool, store, run
        count = machine.workers.rollouts
        machine_of_worker = Machine(
            store=str(store.root),
            # On this machine, only the step's rollouts are sent to the remote store; shards stay local.
            remote_store=machine.remote_store if machine.cluster else None,
            workers=MachineWorkers(environments=max(1, machine.playing_processes // count)),
            limits=MachineLimits(
                max_concurrent=max(1, machine.limits.max_concurrent // count),
                environment_timeout=machine.limits.environment_timeout,
                generation_timeout=machine.limits.generation_timeout,
            ),
        )
        self._groups = max(1, machine_of_worker.limits.max_concurrent // plan.group_size)
        limits = pool.limits
        settings = WorkerPlan(
            environment=environment,
            group_size=plan.group_size,
            sampling=plan.sampling,
            seed=plan.seed,
            machine=machine_of_worker,
            sampled=limits.sampled,
            prompt=limits.prompt,
            forbidden=tuple(sorted(limits.forbidden)),
            max_model_len=limits.max_model_len,
            placeholders=limits.placeholders,
            experts=limits.experts,
            tool_format=pool.tool_format,
        ).model_dump(mode="json")
        env = {PROJECT: str(project_folder().resolve())} if PROJECT in os.environ else {}
        self._workers = WorkerPool(
            lambda: make_worker(WORKER, settings, timeout=SILENCE, env=env, most_bytes=MOST_BYTES), count
        )
        self._free = {worker: asyncio.Lock() for worker in self._workers.workers}
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="shard")
        self._made_of = defaultdict[int, list[str]](list)
        self._late_after = machine.limits.rollout_straggler_timeout
        self._awaited = dict[int, float]()

    def training_waits(self, step: int) -> None:
        """Record that training now waits for the rollouts of `step`. May be called from any thread."""
        self._awaited[step] = time.monotonic()

    async def collect(
        self, tasks: Sequence[Task], events: Events, *, step: int, first_group: int, name: str
    ) -> GenerateOutputs:
        """Collect rollouts as `armature.components.rollouts.collect.collect` does, with equal results.

        Each worker plays one shard at a time. A shard whose worker or node is lost is collected again by the next free
        worker. The worker of a late shard (see `machine.limits.rollout_straggler_timeout`) is ended, its rollouts are
        dropped, and another worker collects the shard.

        Raises:
            ConfigurationError: a worker cannot be started, or this machine does not see the store that it writes to.
            ServerError: no server is left.
            WorkerError, StoreError: a shard failed `ATTEMPTS` times.
        """
        size = min(self._groups, -(-len(tasks) // len(self._workers.workers)))
        starts = range(0, len(tasks), size)
        shards = [RolloutShard(step, first_group + start, tuple(tasks[start : start + size])) for start in starts]
        queue, made = ShardQueue[RolloutShard, Worker](shards), dict[int, GenerateOutputs]()
        progress = CollectionProgress(name, len(tasks) * self._plan.group_size, events)

        async def work(worker: Worker) -> None:
            while taken := await queue.take():
                shard, attempt = taken
                try:
                    outputs = await self._made(worker, shard, queue)
                except WorkerError as error:
                    if attempt == ATTEMPTS:
                        raise
                    events.message(f"{shard} is collected again: {error}")
                    await queue.put_back(shard, attempt + 1)
                    await asyncio.sleep(PAUSE)  # another worker takes it, if one is free
                    continue
                made[shard.first_group] = outputs
                await queue.made()
                for result in chain[Trajectory | Failure](outputs.trajectories, outputs.failures):
                    progress.add(result)

        try:
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._replace_late(step, queue, events))
                await asyncio.gather(*(group.create_task(work(worker)) for worker in self._workers.workers))
                looking.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        parts = [made[shard.first_group] for shard in shards]
        outputs = GenerateOutputs(
            tuple(one for part in parts for one in part.trajectories),
            tuple(one for part in parts for one in part.failures),
        )
        if outputs.failures:
            events.message(failures_said(outputs.failures, len(tasks) * self._plan.group_size, f"{name}, step {step}"))
        return outputs

    async def _replace_late(self, step: int, queue: ShardQueue[RolloutShard, Worker], events: Events) -> None:
        while self._late_after is not None:
            await asyncio.sleep(LOOK_EVERY)
            if (awaited := self._awaited.get(step)) is None:
                continue
            for shard, worker in queue.overdue(time.monotonic(), awaited, self._late_after):
                self._pool.statistics.stragglers += 1
                events.message(f"{shard} is late: training has waited {self._late_after:g} s; its worker is replaced")
                await asyncio.to_thread(worker.close)  # its call fails, and the shard is collected again

    async def _made(
        self, worker: Worker, shard: RolloutShard, queue: ShardQueue[RolloutShard, Worker]
    ) -> GenerateOutputs:
        key = f"{self._run}-{shard.name}"
        tasks = [{**asdict(task), "payload": task.payload} for task in shard.tasks]
        requests = len(shard.tasks) * self._plan.group_size
        async with self._free[worker], self._pool.direct_access(requests) as servers:
            access = [asdict(server) for server in servers]
            play = partial(
                worker.stream,
                *("play", key, shard.step, shard.first_group, tasks, access),
                part=NOTHING,
                most_parts=MOST_SIGNS,
                reply=SHARD_REPLY,
            )
            try:
                with queue.played(shard, worker, time.monotonic()):
                    _, reply = await asyncio.get_running_loop().run_in_executor(self._threads, play)
            except asyncio.CancelledError:
                worker.close()
                raise
        self._pool.report_suspects([SuspectServer(**dict(each)) for each in reply.suspects])
        if not reply.made:
            await asyncio.sleep(PAUSE)
            suspects = ", ".join(each.name for each in reply.suspects)
            raise WorkerError("all servers of the worker are gone", code="lent_servers_lost", where=suspects)
        artifact = await asyncio.to_thread(self._store.find, SHARDS, key)
        if artifact is None:
            raise ConfigurationError(
                "a worker wrote its rollouts to a store that this machine does not see",
                code="store_not_shared",
                where=f"machine.store = {str(self._store.root)!r} there",
                remedy="set machine.remote_store, or mount one store under the same path on all nodes",
            )
        self._made_of[shard.step].append(key)
        return await asyncio.to_thread(read_rollouts, artifact.path)

    def forget(self, step: int) -> None:
        """Delete the shards of `step` from the store. Call this once an artifact holds all rollouts of the step. Images
        are not deleted."""
        self._awaited.pop(step, None)
        for key in self._made_of.pop(step, ()):
            self._store.discard(SHARDS, key)

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()
        self._threads.shutdown()
