"""The worker process that collects shards of rollouts. A shard is some groups of a step, stored as an artifact."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import aclosing
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.errors import ServerError
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.settings import Settings
from armature.components.contracts.stages import Artifact
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.direct_access import DirectServers, ServerAccess
from armature.components.inference.requests import AnswerLimits
from armature.components.inference.settings import SamplingSettings
from armature.components.inference.tool_calls import ToolFormat
from armature.components.machine.workers.channel import serve
from armature.components.rollouts.collect import collect
from armature.components.rollouts.table import write_rollouts

SHARDS = "rollout-shards"
ALIVE_EVERY = 5.0
"""Seconds between two messages of a busy worker that show that it is alive."""


class WorkerPlan(Settings):
    """The settings of a worker: its environment, sampling, share of the machine, and the limits of valid answers."""

    environment: EnvironmentSettings
    group_size: int
    sampling: SamplingSettings
    seed: int
    machine: Machine
    sampled: int
    prompt: int
    forbidden: tuple[int, ...]
    max_model_len: int
    placeholders: tuple[str, ...]
    experts: tuple[int, int, int] | None
    tool_format: ToolFormat

    @property
    def limits(self) -> AnswerLimits:
        """Limits that the worker checks servers' answers against."""
        forbidden = frozenset(self.forbidden)
        return AnswerLimits(self.sampled, self.prompt, forbidden, self.max_model_len, self.placeholders, self.experts)


class RolloutWorker:
    """Collect shards one after the other, with one environment for all of them."""

    def __init__(self, **plan: Any) -> None:
        self._plan = WorkerPlan.model_validate(plan)
        machine = self._plan.machine
        self._store = ArtifactStore(Path(machine.store), machine.remote_store)

    @cached_property
    def _environment(self) -> Environment:
        return make_environment(self._plan.environment, self._plan.machine.workers.environments)

    def play(
        self, key: str, step: int, first_group: int, tasks: list[dict[str, Any]], servers: list[dict[str, Any]]
    ) -> Generator[None, None, dict[str, Any]]:
        """Collect one group of rollouts for each task, and store them as the artifact `key` unless it exists already.

        Yield None every `ALIVE_EVERY` seconds. Return a dictionary with two keys: `made` is False if all servers were
        gone, and `suspects` lists the servers that failed. If there is a remote store, it has the artifact and its
        images when this returns.
        """
        with ThreadPoolExecutor(1) as thread:
            playing = thread.submit(self._made, key, step, first_group, tasks, servers)
            while not wait([playing], ALIVE_EVERY).done:
                yield None
            return playing.result()

    def _made(
        self, key: str, step: int, first_group: int, tasks: list[dict[str, Any]], servers: list[dict[str, Any]]
    ) -> dict[str, Any]:
        made, suspects = True, list[dict[str, str]]()
        if self._store.find(SHARDS, key) is None:
            machine = self._plan.machine
            borrowed = DirectServers(
                [ServerAccess(**server) for server in servers],
                self._plan.limits,
                machine.limits.max_concurrent,
                machine.limits.generation_timeout,
                self._plan.tool_format,
            )
            try:
                outputs = asyncio.run(self._collect(borrowed, step, first_group, [Task(**task) for task in tasks]))
                self._write(key, step, outputs)
            except ServerError:
                if not borrowed.suspects:
                    raise
                made = False
            suspects = [asdict(each) for each in borrowed.suspects.values()]
        self._store.send_waiting()
        return {"made": made, "suspects": suspects}

    async def _collect(self, servers: DirectServers, step: int, first_group: int, tasks: list[Task]) -> GenerateOutputs:
        plan = self._plan
        servers.requests.open()
        async with aclosing(servers.requests):
            return await collect(
                self._environment,
                tasks,
                plan.group_size,
                servers.requests,
                ImageStore(self._store.images),
                plan.sampling,
                step=step,
                seed=plan.seed,
                machine=plan.machine,
                events=_Silent(),
                first_group=first_group,
            )

    def _write(self, key: str, step: int, outputs: GenerateOutputs) -> None:
        def fill(folder: Path) -> None:
            write_rollouts(folder, outputs)
            rows = {"trajectories": len(outputs.trajectories), "failures": len(outputs.failures)}
            settings = {"step": step}
            write_manifest(
                folder, kind=SHARDS, kind_version=1, rows=rows, drops=outputs.drops, inputs={}, settings=settings
            )

        self._store.write(SHARDS, key, fill)

    def close(self) -> None:
        if "_environment" in vars(self):  # it has played
            self._environment.close()


class _Silent:
    """An implementation of `Events` that ignores all events. The process that asked for the shard reports on it."""

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None: ...


if __name__ == "__main__":
    serve(RolloutWorker)
