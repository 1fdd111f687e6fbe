"""A run of `train-vla-rl` on the virtual clock: loop, schedule, advantages and updates are the real ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean
from typing import cast

import numpy as np

from armature.components.contracts.stages import Artifact
from armature.components.environments.libero.tasks import suite_tasks
from armature.components.evaluation.libero.schedule import plan_episodes
from armature.components.evaluation.libero.settings import LiberoEvaluationSettings
from armature.components.planning.clock import VirtualLoop, VirtualUnits
from armature.components.planning.robots.costs import RobotCosts
from armature.components.planning.robots.play import SimulatedPlay
from armature.components.planning.robots.workload import RobotEpisode, RobotWorkload
from armature.components.planning.simulate import NoEvents, simulated_artifact
from armature.components.rl.evaluations import due
from armature.components.rl.loop import Ahead, run_loop
from armature.components.vla_rl.batch import build_batch, groups_that_differ
from armature.components.vla_rl.schedule import plan_step
from armature.components.vla_rl.settings import GAE, RewardWeighted, RobotRLTrainerSettings, TrainVLARLSettings
from armature.components.vla_rl.table import Answer, AnswerSample
from armature.components.vla_rl.updates import update_rows

_FLOATS, _NUMBERS = np.zeros(0, np.float32), np.zeros(0, np.int32)


@dataclass(frozen=True)
class SimulatedRobotRun:
    """What is simulated: simulators in `processes`, a trainer of `ranks`, `chunk` actions to an answer.

    The policy answers on the GPU of the first rank.
    """

    settings: TrainVLARLSettings
    costs: RobotCosts
    workload: RobotWorkload
    processes: int
    ranks: int
    chunk: int
    steps: int = 3

    @property
    def settled(self) -> int:
        """The first step that counts: in those before it simulators are built, nothing is ahead yet, and there are
        fewer earlier steps to train on again."""
        return max(2 + self.settings.rollouts.max_staleness, 1 + self.replayed)

    @property
    def replayed(self) -> int:
        """Steps before a step that are trained on again."""
        weighting = self.settings.trainer.weighting
        return weighting.earlier_steps if isinstance(weighting, RewardWeighted) else 0

    def simulate(self) -> RobotSimulated:
        """The run, on a loop of its own."""
        loop = VirtualLoop()
        try:
            return _RobotSteps(self, loop).run()
        finally:
            _end(loop)

    def evaluation_seconds(self, evaluation: LiberoEvaluationSettings) -> float:
        """Of all its episodes, from simulators that have to be built on."""
        loop = VirtualLoop()
        try:
            steps = _RobotSteps(self, loop)
            loop.run_until_complete(steps.examine(evaluation))
            return loop.time()
        finally:
            _end(loop)


@dataclass(frozen=True)
class RobotSimulated:
    """Means over the steps that count; shares are of the time that passed."""

    step_seconds: float
    timings: Mapping[str, float]
    episodes_per_step: float
    answers_per_step: float
    trained_per_step: float
    simulator_share: float
    policy_share: float
    trainer_share: float
    gpu_seconds: float
    """Of an episode."""


@dataclass(frozen=True)
class _RobotRecord:
    """Sums since the run began, at the end of a step."""

    at: float
    timings: Mapping[str, float]
    episodes: int
    answers: int
    trained: int
    simulators: float
    policy: float
    trainer: float


class _RobotSteps:
    """The units of the steps."""

    def __init__(self, run: SimulatedRobotRun, loop: VirtualLoop) -> None:
        self.run_, self.loop, self.settings, self.costs = run, loop, run.settings, run.costs
        self.play = SimulatedPlay(run.costs, run.processes)
        self.tasks = suite_tasks(self.settings.rollouts.suite)
        self.answers: dict[int, list[Answer]] = {}
        self.earlier: deque[list[Answer]] = deque(maxlen=run.replayed)
        self.samples: dict[int, Sequence[AnswerSample]] = {}
        self.episodes: dict[int, int] = {}
        self.records: list[_RobotRecord] = []
        self.trained = 0.0
        advantage = self.settings.trainer.advantage
        self.bootstrap = isinstance(advantage, GAE) and advantage.bootstrap_truncated

    def run(self) -> RobotSimulated:
        run, plan = self.run_, self.settings.rollouts
        last = run.settled - 1 + run.steps + 1  # the last one has no sync
        self.loop.run_until_complete(self._episodes(0, 0))  # of the pre-flight
        run_loop(self, 1, last, Ahead(plan.max_staleness), VirtualUnits(self.loop), NoEvents(), now=self.loop.time)
        before, *counted = self.records[run.settled - 2 : run.settled - 1 + run.steps]
        end, seconds = counted[-1], max(counted[-1].at - before.at, 1e-12)
        episodes = fmean(record.episodes for record in counted)
        return RobotSimulated(
            step_seconds=seconds / len(counted),
            timings={
                name: fmean(record.timings.get(name, 0.0) for record in counted)
                for name in set().union(*(record.timings for record in counted))
            },
            episodes_per_step=episodes,
            answers_per_step=fmean(record.answers for record in counted),
            trained_per_step=fmean(record.trained for record in counted),
            simulator_share=(end.simulators - before.simulators) / seconds / run.processes,
            policy_share=(end.policy - before.policy) / seconds,
            trainer_share=(end.trainer - before.trainer) / seconds,
            gpu_seconds=seconds / len(counted) * run.ranks / episodes,
        )

    # The units of the loop

    def rollouts(self, step: int) -> Artifact:
        """A coroutine, which `VirtualUnits` begins."""
        return cast(Artifact, self._rollouts(step))

    async def _rollouts(self, step: int) -> Artifact:
        plan, answers, episodes = self.settings.rollouts, list[Answer](), 0
        for number in range(plan.max_rounds):
            found = await self._episodes(step, number)
            answers += [answer for episode in found for answer in episode]
            episodes += len(found)
            if len(groups_that_differ(answers)) >= plan.groups_per_step:
                break
        self.answers[step], self.episodes[step] = answers, episodes
        await asyncio.sleep(self.costs.flow.step_seconds)
        return simulated_artifact(step)

    async def _episodes(self, step: int, number: int) -> list[list[Answer]]:
        plan, chunk = self.settings.rollouts, self.run_.chunk
        groups = plan_step(plan, self.tasks, step, number)
        first = number * plan.groups_per_step
        places = [(first + group, member) for group, planned in enumerate(groups) for member in range(len(planned))]
        episodes = [self.run_.workload.episode(step, *place) for place in places]
        planned = [one for group in groups for one in group]
        await self.play.play(planned, episodes.__getitem__, plan.batch, chunk, self.bootstrap and step > 0)
        return [_answers(step, place, one, chunk) for place, one in zip(places, episodes, strict=True)]

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        plan, flow = self.settings.rollouts, self.costs.flow
        wanted = plan.groups_per_step if plan.max_rounds > 1 else None
        earlier = [answer for played in self.earlier for answer in played]
        self.earlier.append(self.answers[step])
        weighting = self.settings.trainer.weighting
        self.samples[step] = build_batch(self.answers[step], weighting, wanted, earlier=earlier).samples
        self.loop.wait(flow.batch_seconds + flow.batch_answer_seconds * len(self.answers[step]))
        return simulated_artifact(step)

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        run = self.run_
        seconds = training_seconds(len(self.samples[step]), self.settings.trainer, self.costs, run.ranks)
        seconds *= run.workload.updates_made
        self.loop.wait(seconds)
        self.trained += seconds
        return {}

    def save(self, step: int) -> None: ...

    def sync(self, version: int) -> None:
        self.loop.wait(self.costs.sync_seconds)

    def awaits(self, step: int) -> None: ...

    def evaluates(self, step: int) -> bool:
        panel = self.settings.evaluation
        return panel is not None and due(panel, step, self.settings.trainer.max_steps)

    def evaluate(self, step: int) -> bool:
        assert self.settings.evaluation is not None
        self.loop.run_until_complete(self.examine(self.settings.evaluation))
        return False

    async def examine(self, evaluation: LiberoEvaluationSettings) -> None:
        planned = plan_episodes(evaluation, {suite: suite_tasks(suite) for suite in evaluation.suites})
        most, workload = self.settings.rollouts.max_steps, self.run_.workload

        def episode_of(number: int) -> RobotEpisode:
            """As those of the rollouts, but for what one may take at most."""
            one = workload.episode(0, number // len(workload.steps[0][0]), number)
            limit = planned[number].max_steps
            return replace(one, actions=max(1, min(one.actions, limit) if one.solved else limit * one.actions // most))

        chunk = evaluation.n_action_steps or self.run_.chunk
        await self.play.play(planned, episode_of, evaluation.batch, chunk, kept=False)

    def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        self.records.append(
            _RobotRecord(
                at=self.loop.time(),
                timings=dict(metrics),
                episodes=self.episodes.pop(step),
                answers=len(self.answers.pop(step)),
                trained=len(self.samples.pop(step)),
                simulators=sum(arena.busy for arena in self.play.arenas),
                policy=self.play.policy.busy,
                trainer=self.trained,
            )
        )
        return metrics


def training_seconds(answers: int, settings: RobotRLTrainerSettings, costs: RobotCosts, ranks: int) -> float:
    """Seconds of a step, of whose updates all are made."""
    own, width = costs.trainer, settings.micro_batch_size
    seconds = 0.0
    for rows in update_rows(answers, settings, 0):
        most = ceil(len(rows) / ranks)
        gathered = ceil(most / width) * own.gather_seconds
        seconds += max(most * own.answer_seconds, gathered) + own.update_seconds
    return seconds


def _answers(step: int, place: tuple[int, int], episode: RobotEpisode, chunk: int) -> list[Answer]:
    """Those of an episode, with nothing in them but what its advantage depends on."""
    group = f"{step:05d}-{place[0]:06d}"
    first = Answer(
        group_id=group,
        episode_id=f"{group}-{place[1]:04d}",
        suite="",
        task=0,
        language="",
        initial_state=0,
        chunk=0,
        policy_version=0,
        cameras=(),
        images=(),
        state=_FLOATS,
        before=_FLOATS,
        after=_FLOATS,
        flow_step=None,
        tokens=_NUMBERS,
        decoded=True,
        logprobs=np.zeros(0),
        actions=_FLOATS,
        executed=chunk,
        reward=0.0,
        done=False,
        truncated=False,
        value=0.0,
        last_value=0.0,
    )
    rows = [replace(first, chunk=number) for number in range(ceil(episode.actions / chunk))]
    rows[-1] = replace(rows[-1], done=True, truncated=not episode.solved, reward=episode.earned)
    return rows


def _end(loop: VirtualLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.wait(0.0)
    loop.close()
