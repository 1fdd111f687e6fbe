"""A run on the virtual clock: loop, rounds, groups, the merging and the routing of requests are the real ones.

What is replaced is at the edge: how long a server, an environment, the trainer and a sync take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np

from armature.components.batches.settings import BatchSettings
from armature.components.contracts.episodes import Task
from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory, Turn
from armature.components.contracts.stages import Artifact
from armature.components.inference.client import GenerationFailure
from armature.components.planning.clock import VirtualLoop, VirtualUnits
from armature.components.planning.costs import Costs
from armature.components.planning.pool import SimulatedPool
from armature.components.planning.trainer import PlannedRollout, SimulatedTrainer, samples_of, training_seconds
from armature.components.planning.workload import Workload
from armature.components.rl.loop import Ahead, run_loop
from armature.components.rollouts.collect import play_groups
from armature.components.rollouts.play import RolloutId
from armature.components.rollouts.rounds import choose_groups, groups_that_differ, play_rounds
from armature.components.rollouts.schedule import tasks_of_step
from armature.components.rollouts.settings import RolloutSettings
from armature.components.training.client import ServiceClient, with_restarts
from armature.components.vlm.settings import TrainerSettings

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True)
class SimulatedRun:
    """What is simulated: `servers` of `gpus_per_server`, a trainer of `ranks`, `max_concurrent` episodes at once.

    `sharing` of the ranks compute a sequence together.
    """

    rollouts: RolloutSettings
    batches: BatchSettings
    trainer: TrainerSettings
    costs: Costs
    workload: Workload
    servers: int
    ranks: int
    max_concurrent: int
    sharing: int = 1
    gpus_per_server: int = 1
    train_tasks: int = 4096
    steps: int = 3
    resumes_alone: bool = True
    """Whether a server that was started again can be given the weights by itself, as from a folder."""
    waits_for_requests: bool = False
    """Whether a sync waits for requests with updates in flight, too."""

    @property
    def gpus(self) -> int:
        return self.servers * self.gpus_per_server + self.ranks

    @property
    def settled(self) -> int:
        """The first step that counts: before it, servers or trainer have not begun to take turns."""
        return 2 + self.rollouts.max_staleness

    def simulate(self, last: int | None = None) -> Simulated:
        """The run, on a loop of its own, up to the step `last`; None: far enough that `steps` of it count.

        Raises:
            TrainerError: the trainer fails so often that the run does not go on.
        """
        loop, routing = VirtualLoop(), logging.getLogger("armature.components.inference.routing")
        before = routing.level
        routing.setLevel(logging.CRITICAL)  # it warns of every request of a server that died
        try:
            return _Steps(self, loop).run(last)
        finally:
            routing.setLevel(before)
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.wait(0.0)
            loop.close()


@dataclass(frozen=True)
class Simulated:
    """Means over the steps that count. Shares are of the time that passed, or of servers times that."""

    step_seconds: float
    every: tuple[float, ...]
    """Seconds of each step of the run, those that do not count as well."""
    timings: Mapping[str, float]
    samples_per_step: float
    server_share: float
    sequences_per_server: float
    trainer_share: float
    flow_share: float
    generate_seconds: float
    """Of a turn, from asking to answer."""
    longest_episode: float
    gpu_seconds: float
    """Per rollout."""
    server_failures: int
    trainer_failures: int


class _Steps:
    """The units of the steps."""

    def __init__(self, run: SimulatedRun, loop: VirtualLoop) -> None:
        self.run_, self.loop = run, loop
        self.costs, self.plan = run.costs, run.rollouts
        self.random = np.random.default_rng((run.workload.seed, 1))
        self.pool = SimulatedPool(
            run.costs,
            run.servers,
            run.max_concurrent,
            run.resumes_alone,
            self.plan.in_flight_updates and not run.waits_for_requests,
        )
        self.room = asyncio.Semaphore(run.max_concurrent)
        self.trainer = SimulatedTrainer(run.costs, run.ranks, loop, self.random)
        self.tasks = [Task(str(index), "train", {}) for index in range(run.train_tasks)]
        self.outputs: dict[int, GenerateOutputs] = {}
        self.records: list[_Record] = []
        self.played: list[float] = []
        self.waited: list[float] = []

    def run(self, last: int | None) -> Simulated:
        run, ahead = self.run_, Ahead(self.plan.max_staleness, self.plan.in_flight_updates)
        if hours := self.costs.failures.hours_between:
            self.pool.fail(hours * 3600 / run.gpus_per_server, self.loop, self.random)
        # The last step has no sync, and the last steps have none after them to play.
        enough = run.settled - 1 + run.steps + max(1, self.plan.max_staleness)
        run_loop(self, 1, last or enough, ahead, VirtualUnits(self.loop), NoEvents(), now=self.loop.time)
        counted = self.records[run.settled - 1 : run.settled - 1 + run.steps]
        return self._means(self.records[run.settled - 2], counted)

    def _means(self, before: _Record, counted: Sequence[_Record]) -> Simulated:
        last, servers = counted[-1], self.run_.servers
        seconds = max(last.at - before.at, 1e-12)
        rollouts = fmean(record.rollouts for record in counted)
        return Simulated(
            step_seconds=seconds / len(counted),
            every=tuple(record.timings["timing/step"] for record in self.records),
            timings={
                name: fmean(record.timings[name] for record in counted)
                for name in counted[0].timings
                if all(name in record.timings for record in counted)
            },
            samples_per_step=rollouts,
            server_share=(last.servers - before.servers) / seconds / servers,
            sequences_per_server=(last.decoded - before.decoded) / max(last.servers - before.servers, 1e-12),
            trainer_share=(last.trainer - before.trainer) / seconds,
            flow_share=(last.flow - before.flow) / seconds,
            generate_seconds=fmean(self.waited),
            longest_episode=max(self.played),
            gpu_seconds=seconds / len(counted) * self.run_.gpus / rollouts,
            server_failures=self.pool.failures,
            trainer_failures=self.trainer.failures,
        )

    # The units of the loop

    def rollouts(self, step: int) -> Artifact:
        """A coroutine, which `VirtualUnits` begins."""
        return cast(Artifact, self._rollouts(step))

    async def _rollouts(self, step: int) -> Artifact:
        self.outputs[step] = await play_rounds(partial(self._round, step), self.plan)
        await asyncio.sleep(self.costs.flow.step_seconds)
        return simulated_artifact(step)

    async def _round(self, step: int, number: int) -> GenerateOutputs:
        tasks = tasks_of_step(self.tasks, self.plan.groups_per_step, step - 1, self.plan.seed, number)
        first = number * len(tasks)
        return await play_groups(self._play, tasks, self.plan.group_size, self.room, step=step, first_group=first)

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        outputs = self.outputs[step]
        flow, played = self.costs.flow, len(outputs.trajectories) + len(outputs.failures)
        self.loop.wait(flow.batch_seconds + flow.rollout_seconds * played)
        return simulated_artifact(step)

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        chosen = choose_groups(self.outputs[step], self.plan).outputs.trajectories
        if self.run_.batches.skip_zero_advantage:
            differing = set(groups_that_differ(self.outputs[step]))
            chosen = [one for one in chosen if one.group_id in differing]
        trained = [PlannedRollout(one.group_id, self.run_.workload.episode(_place(one))) for one in chosen]
        samples = samples_of(trained, self.run_.workload.dialogue)
        seconds = training_seconds(samples, self.run_.trainer, self.costs.trainer, self.run_.ranks, self.run_.sharing)
        self._of_trainer(step - 1, lambda: self.trainer.step(step, seconds))
        return {}

    def _of_trainer(self, done: int, ask: Any) -> None:
        client = cast(ServiceClient, self.trainer)
        with_restarts(client, done, ask, self.trainer.again, NoEvents())

    def save(self, step: int) -> None:
        if step % self.run_.trainer.save_every == 0:
            self._of_trainer(step, lambda: self.trainer.save(step))

    def sync(self, version: int) -> None:
        if self.pool.lost:  # no server had the weights, and only the trainer: the run resumes from its checkpoint
            self.pool.lost = 0
            self.trainer.alive = False
            self._of_trainer(version, self.trainer.needed)
        self.loop.wait(self.costs.publish_seconds)
        self.loop.run_until_complete(self.pool.sync())

    def awaits(self, step: int) -> None: ...

    def evaluates(self, step: int) -> bool:
        return False

    def evaluate(self, step: int) -> bool:
        return False

    def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        outputs = self.outputs.pop(step)
        busy, decoded = self.pool.work(self.loop.time())
        self.records.append(
            _Record(
                at=self.loop.time(),
                timings=dict(metrics),
                rollouts=len(outputs.trajectories) + len(outputs.failures),
                servers=busy,
                decoded=decoded,
                trainer=self.trainer.busy,
                flow=self.pool.flow.busy,
            )
        )
        return metrics

    # Episodes

    async def _play(self, task: Task, place: RolloutId) -> Trajectory | Failure:
        episode = self.run_.workload.episode(place)
        began = self.loop.time()
        for index, turn in enumerate(episode):
            await asyncio.sleep(turn.environment_seconds)
            # The members of a group are shown the same at first, and then what each has done.
            shown = place.group_id if index == 0 else f"{place.trajectory_id}, turn {index}"
            asked, seed = self.loop.time(), place.request_seed(self.plan.seed, index)
            try:
                await self.pool.complete(shown, self.plan.sampling, seed, turn)
            except GenerationFailure as failed:
                return Failure(place.trajectory_id, place.group_id, task.task_id, failed.reason, "")
            self.waited.append(self.loop.time() - asked)
        self.played.append(self.loop.time() - began)
        reward = float(place.member % 2) if self.run_.workload.has_signal(place) else 0.0
        return Trajectory(place.trajectory_id, place.group_id, "", task.task_id, "train", (_turn(reward),), False)


@dataclass(frozen=True)
class _Record:
    """Sums since the run began, at the end of a step."""

    at: float
    timings: Mapping[str, float]
    rollouts: int
    servers: float
    decoded: float
    trainer: float
    flow: float


class NoEvents:
    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None: ...


def _place(trajectory: Trajectory) -> RolloutId:
    step, group, member = map(int, trajectory.trajectory_id.split("-"))
    return RolloutId(step, group, member)


def simulated_artifact(step: int) -> Artifact:
    return Artifact(kind="simulated", path=Path(), digest=str(step))


def _turn(reward: float) -> Turn:
    nothing = np.zeros(0, np.float32)
    return Turn(0, _NOTHING, _NOTHING, nothing, "stop", 0, (), "", "", reward, {}, None, None, None, 0.0, 0.0)
