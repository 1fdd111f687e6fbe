"""Rollouts of one step: many episodes at once, with simulators in processes and one policy that batches requests."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

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
from armature.components.robots.policies.player import FlowPolicy
from armature.components.robots.rl.batch import chunk_rewards
from armature.components.robots.rl.record import ActionChunkRecorder, PredictedChunk, episode_defect
from armature.components.robots.rl.schedule import answer_seed, episode_ids
from armature.components.robots.rl.settings import RobotRolloutSettings, SuccessReward
from armature.components.robots.rl.table import ActionChunk
from armature.components.rollouts.collect import failures_said

# --- Time spent per part: simulators, policy, recording ---


class PlayTimes:
    """Durations in seconds and counts of events, summed over all threads since the last call of `since`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def measured(self, name: str) -> Iterator[dict[str, float]]:
        """Measure a `with` block and add its duration in seconds to the sum `timing/<name>`.

        The block gets a dict for counts by metric, which are added too. If the block raises, nothing is added.
        """
        began, counted = time.perf_counter(), dict[str, float]()
        yield counted
        counted[f"timing/{name}"] = time.perf_counter() - began
        with self._lock:
            for key, value in counted.items():
                self._sums[key] += value

    def since(self) -> dict[str, float]:
        """Return the sums by metric since the last call of this method, and reset them to zero."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        return dict(sums)


class TimedSimulators:
    """Client of one simulator process that measures the time of each call.

    Calls of different slots run one after the other; the time a call waits for another slot does not count.
    """

    def __init__(self, process: SimulatorClient, times: PlayTimes) -> None:
        self._process, self._times = process, times
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
        """Reset the slot. A reset that has to build the simulator first is timed as `simulator_build`."""
        with self._lock, self._forgotten_when_lost():
            stays = self._built.get(slot) == task
            with self._times.measured("simulator_reset" if stays else "simulator_build") as counted:
                seen = self._process.reset(task, initial_state, seed, slot, perturbation)
                counted["simulator/resets" if stays else "simulator/builds"] = 1
            self._built[slot] = task
        return seen

    def step(self, actions: NDArray[np.float32], slot: int = 0, film: bool = False) -> ChunkResult:
        with self._require_simulator(slot), self._times.measured("simulator_step") as counted:
            carried = self._process.step(actions, slot, film)
            counted["simulator/actions"] = carried.steps
        return carried

    def progress(self, slot: int = 0) -> list[GoalProgress]:
        with self._require_simulator(slot):
            return self._process.progress(slot)

    @contextmanager
    def _require_simulator(self, slot: int) -> Iterator[None]:
        with self._lock:
            if slot not in self._built:
                raise LostBesideError("the simulator process died during the call of another episode")
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
"""Failure reason of an episode that failed in all attempts, see `armature.components.contracts.errors`."""


@dataclass(frozen=True)
class CollectedEpisodes:
    """Chunks of the episodes that were played, ordered by group, member and chunk; and the episodes that failed."""

    answers: list[ActionChunk]
    failures: list[Failure]


class Collector:
    """Plays groups of episodes. The results depend neither on the number of simulators nor on the order of play.

    Args:
        processes: processes with simulators, which stay up between steps.
        images: the store that observed images are written to.
        on_progress: called with the number of finished episodes and the number of all.
        gamma: discount per chunk, for shaped rewards.

    lost: number of attempts so far in which the simulator died.
    processes: clients of the processes that were passed in. They add the time of each call to `times`.
    """

    def __init__(
        self,
        settings: RobotRolloutSettings,
        policy: FlowPolicy,
        processes: Sequence[SimulatorClient],
        images: ImageStore,
        on_progress: Callable[[int, int], None],
        gamma: float = 1.0,
    ) -> None:
        self._settings, self._policy, self.times = settings, policy, PlayTimes()
        self.processes = [TimedSimulators(process, self.times) for process in processes]
        self._images, self._on_progress, self._gamma = images, on_progress, gamma
        self._player = EpisodePlayer(self.processes, settings.batch, settings.attempts)
        self.lost = 0

    def collect(
        self,
        groups: Sequence[Sequence[PlannedEpisode]],
        step: int,
        version: int,
        bootstrap: bool,
        may_fail: int | None = None,
    ) -> CollectedEpisodes:
        """Play all episodes of `groups` and return their chunks.

        Args:
            bootstrap: ask for the value of a failed episode's last observation, see `ActionChunkRecorder.value_after`.
            may_fail: number of episodes that may fail; None: `failed_fraction` of all.

        Raises:
            WorkerError: more episodes failed in all attempts.
            DataError: the policy returned something that is not an action.
        """
        planned = [episode for group in groups for episode in group]
        played: dict[PlannedEpisode, list[ActionChunk]] = {}
        failed: dict[PlannedEpisode, Failure] = {}
        most = int(self._settings.failed_fraction * len(planned)) if may_fail is None else may_fail
        queue = InferenceQueue(self._predict, self._policy.rows_per_pass, self._prepared)

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
                    failures_said(failures, len(planned), f"too many episodes failed, at most {most} may"),
                    code="too_many_episodes_failed",
                    where=f"step {step}, rollouts.failed_fraction",
                    remedy="see the simulators' logs and start again: finished steps are kept",
                )
            self._on_progress(len(played) + len(failed), len(planned))

        self._player.play(planned, queue, attempt, finish)
        return CollectedEpisodes(
            answers=[answer for episode in planned for answer in played.get(episode, ())],
            failures=[failed[episode] for episode in planned if episode in failed],
        )

    def _prepared(self, observation: RobotObservation) -> RobotObservation:
        with self.times.measured("prepare"):
            return self._policy.prepared(observation)

    def _predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> Sequence[PredictedChunk]:
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
        def predict(observation: RobotObservation, chunk: int) -> Future[PredictedChunk]:
            return queue.ask(observation, answer_seed(self._settings, step, planned, chunk))

        recorder, reward = ActionChunkRecorder(predict), self._settings.reward
        measure = not isinstance(reward, SuccessReward)
        episode = play_episode(simulator.process, simulator.slot, planned, recorder, measure=measure)
        last_value = recorder.value_after(episode) if bootstrap and not episode.success else None
        rewards = partial(chunk_rewards, reward, gamma=self._gamma)
        with self.times.measured("keep_answers"):
            return recorder.rows(planned, episode, step, version, self._images, last_value, rewards)


def _failure(planned: PlannedEpisode, step: int, reason: str, detail: str) -> Failure:
    group_id, episode_id = episode_ids(step, planned)
    task_id = f"{planned.task.suite}/{planned.task.index}"
    return Failure(episode_id, group_id, task_id, reason, f"{planned.name}: {detail}")
