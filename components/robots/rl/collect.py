"""Rollouts of one step: players in threads, simulators in processes, one policy that answers who waits."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.rollouts import Failure
from armature.components.machine.workers.channel import WorkerError
from armature.components.robots.evaluation.episode import LostBesideError, SimulatorClient, play_episode
from armature.components.robots.evaluation.run import AttemptedEpisode, EpisodePlayer, InferenceQueue, SimulatorSlot
from armature.components.robots.evaluation.schedule import PlannedEpisode
from armature.components.robots.libero.processes import ChunkResult
from armature.components.robots.libero.progress import GoalProgress
from armature.components.robots.libero.settings import Perturbation
from armature.components.robots.libero.tasks import LiberoTask
from armature.components.robots.policies.molmoact2.policy import FlowChunk, PlainChunk, TokenChunk
from armature.components.robots.rl.batch import chunk_rewards
from armature.components.robots.rl.record import ActionChunkRecorder, PredictedChunk, episode_defect
from armature.components.robots.rl.schedule import answer_seed, episode_ids
from armature.components.robots.rl.settings import RobotRolloutSettings, SuccessReward
from armature.components.robots.rl.table import ActionChunk
from armature.components.rollouts.collect import failures_said

# What it takes to play the episodes of a step: seconds of simulators, of the policy, and of keeping what was seen.


class PlayTimes:
    """Sums of seconds and counts, over all threads, since they were asked for last."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def measured(self, name: str) -> Iterator[dict[str, float]]:
        """Adds the seconds of the block as `timing/<name>`, and what the block counts; nothing if it raises."""
        began, counted = time.perf_counter(), dict[str, float]()
        yield counted
        counted[f"timing/{name}"] = time.perf_counter() - began
        with self._lock:
            for key, value in counted.items():
                self._sums[key] += value

    def since(self) -> dict[str, float]:
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        return dict(sums)


class TimedSimulators:
    """Simulators of a process, and how long it works for each call: waiting for those of other slots does not count."""

    def __init__(self, arena: SimulatorClient, times: PlayTimes) -> None:
        self._arena, self._times = arena, times
        self._built: dict[int, LiberoTask] = {}
        self._lock = threading.Lock()

    def reset(
        self,
        task: LiberoTask,
        initial_state: int,
        seed: int,
        slot: int = 0,
        perturbation: Perturbation | None = None,
    ) -> RobotObservation:
        """A reset that builds a simulator first is one of `simulator_build`."""
        with self._lock, self._forgotten_when_lost():
            stays = self._built.get(slot) == task
            with self._times.measured("simulator_reset" if stays else "simulator_build") as counted:
                seen = self._arena.reset(task, initial_state, seed, slot, perturbation)
                counted["simulator/resets" if stays else "simulator/builds"] = 1
            self._built[slot] = task
        return seen

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        with self._standing(slot), self._times.measured("simulator_step") as counted:
            carried = self._arena.step(actions, slot, film)
            counted["simulator/actions"] = carried.steps
        return carried

    def progress(self, slot: int = 0) -> list[GoalProgress]:
        with self._standing(slot):
            return self._arena.progress(slot)

    @contextmanager
    def _standing(self, slot: int) -> Iterator[None]:
        with self._lock:
            if slot not in self._built:
                raise LostBesideError("the simulator's process was lost in an episode that was played beside this one")
            with self._forgotten_when_lost():
                yield

    @contextmanager
    def _forgotten_when_lost(self) -> Iterator[None]:
        try:
            yield
        except WorkerError:
            self._built.clear()
            raise


FAILED = "environment_error"
"""The reason of an episode that failed in every attempt, as in `armature.components.contracts.errors`."""


class RolloutPolicy(Protocol):
    """Row i depends on observation i and seed i alone, to the last bit; see `MolmoAct2Policy`."""

    @property
    def rows_per_pass(self) -> int: ...

    def prepared(self, observation: RobotObservation) -> RobotObservation: ...

    def answer(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> list[PlainChunk]: ...

    def sample_flow_sde(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], noise_level: float
    ) -> list[FlowChunk]: ...

    def score_flow_losses(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], flow_samples: int
    ) -> list[FlowChunk]: ...

    def sample_action_tokens(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], temperature: float
    ) -> list[TokenChunk]: ...


@dataclass(frozen=True)
class CollectedEpisodes:
    """The answers of the episodes that were played, by group, member and chunk; and the episodes that failed."""

    answers: list[ActionChunk]
    failures: list[Failure]


class Collector:
    """Plays groups of episodes. What comes of them depends on neither the number of simulators nor their order.

    Args:
        arenas: processes with simulators; they stay up from step to step.
        images: where what was seen is kept.
        told: is called with the numbers of finished and of all episodes.
        gamma: discount per chunk, which shaped rewards depend on.

    lost: attempts at episodes that were lost with their simulator, so far.
    arenas: those that were given, whose work counts in `times`.
    """

    def __init__(
        self,
        settings: RobotRolloutSettings,
        policy: RolloutPolicy,
        arenas: Sequence[SimulatorClient],
        images: ImageStore,
        told: Callable[[int, int], None],
        gamma: float = 1.0,
    ) -> None:
        self._settings, self._policy, self.times = settings, policy, PlayTimes()
        self.arenas = [TimedSimulators(arena, self.times) for arena in arenas]
        self._images, self._told, self._gamma = images, told, gamma
        self._player = EpisodePlayer(self.arenas, settings.batch, settings.attempts)
        self.lost = 0

    def collect(
        self,
        groups: Sequence[Sequence[PlannedEpisode]],
        step: int,
        version: int,
        bootstrap: bool,
        may_fail: int | None = None,
    ) -> CollectedEpisodes:
        """
        Args:
            bootstrap: episodes that fail are to go on; see `ActionChunkRecorder.value_after`.
            may_fail: how many episodes; None: `failed_fraction` of them.

        Raises:
            WorkerError: more episodes failed in every attempt.
            DataError: the policy answered with something that is not an action.
        """
        planned = [episode for group in groups for episode in group]
        played: dict[PlannedEpisode, list[ActionChunk]] = {}
        failed: dict[PlannedEpisode, Failure] = {}
        most = int(self._settings.failed_fraction * len(planned)) if may_fail is None else may_fail
        queue = InferenceQueue(self._answers, self._policy.rows_per_pass, self._prepared)

        def attempt(simulator: SimulatorSlot, episode: PlannedEpisode) -> list[ActionChunk]:
            return self._play(simulator, episode, queue, step, version, bootstrap)

        def finish(episode: PlannedEpisode, attempted: AttemptedEpisode[list[ActionChunk]]) -> None:
            self.lost += attempted.lost
            rows = attempted.result
            defect = (FAILED, str(attempted.problem)) if rows is None else episode_defect(rows)
            if defect is not None:
                failed[episode] = _failure(episode, step, *defect)
            else:
                played[episode] = rows or []
            if len(failed) > most:
                failures = [failed[each] for each in planned if each in failed]
                raise WorkerError(
                    failures_said(failures, len(planned), f"too many episodes failed, {most} may"),
                    code="too_many_episodes_failed",
                    where=f"step {step}, rollouts.failed_fraction",
                    remedy="see the simulators' logs; start again: steps that are made are kept",
                )
            self._told(len(played) + len(failed), len(planned))

        self._player.play(planned, queue, attempt, finish)
        return CollectedEpisodes(
            answers=[answer for episode in planned for answer in played.get(episode, ())],
            failures=[failed[episode] for episode in planned if episode in failed],
        )

    def _prepared(self, observation: RobotObservation) -> RobotObservation:
        with self.times.measured("prepare"):
            return self._policy.prepared(observation)

    def _answers(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> Sequence[PredictedChunk]:
        settings = self._settings
        with self.times.measured("policy") as counted:
            counted["policy/passes"] = 1
            if settings.inference_action_mode == "discrete":
                return self._policy.sample_action_tokens(observations, seeds, settings.temperature)
            if settings.likelihood == "fpo":
                return self._policy.score_flow_losses(observations, seeds, settings.flow_samples)
            if settings.likelihood == "none":
                return self._policy.answer(observations, seeds)
            return self._policy.sample_flow_sde(observations, seeds, settings.noise_level)

    def _play(
        self,
        simulator: SimulatorSlot,
        planned: PlannedEpisode,
        queue: InferenceQueue[PredictedChunk],
        step: int,
        version: int,
        bootstrap: bool,
    ) -> list[ActionChunk]:
        def explored(observation: RobotObservation, chunk: int) -> Future[PredictedChunk]:
            return queue.ask(observation, answer_seed(self._settings, step, planned, chunk))

        recorder, reward = ActionChunkRecorder(explored), self._settings.reward
        measure = not isinstance(reward, SuccessReward)
        episode = play_episode(simulator.arena, simulator.slot, planned, recorder, measure=measure)
        last_value = recorder.value_after(episode) if bootstrap and not episode.success else None
        rewards = partial(chunk_rewards, reward, gamma=self._gamma)
        with self.times.measured("keep_answers"):
            return recorder.rows(planned, episode, step, version, self._images, last_value, rewards)


def _failure(planned: PlannedEpisode, step: int, reason: str, detail: str) -> Failure:
    group_id, episode_id = episode_ids(step, planned)
    task_id = f"{planned.task.suite}/{planned.task.index}"
    return Failure(episode_id, group_id, task_id, reason, f"{planned.name}: {detail}")
