"""Rollouts of one step: players in threads, simulators in processes, one policy that answers who waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.rollouts import Failure
from armature.components.evaluation.libero.batching import InferenceQueue
from armature.components.evaluation.libero.episode import SimulatorClient, play_episode
from armature.components.evaluation.libero.run import AttemptedEpisode, EpisodePlayer, SimulatorSlot
from armature.components.evaluation.libero.schedule import PlannedEpisode
from armature.components.policies.molmoact2.policy import ExploredAnswer, PlainAnswer, SpokenAnswer
from armature.components.rollouts.collect import failures_said
from armature.components.vla_rl.record import AnswerRecorder, PlayedAnswer, episode_defect
from armature.components.vla_rl.rewards import chunk_rewards
from armature.components.vla_rl.schedule import answer_seed, episode_ids
from armature.components.vla_rl.settings import RobotRolloutSettings, SuccessReward
from armature.components.vla_rl.table import Answer
from armature.components.vla_rl.timing import PlayTimes, TimedSimulators
from armature.components.workers.errors import WorkerError

FAILED = "environment_error"
"""The reason of an episode that failed in every attempt, as in `armature.components.contracts.failures`."""


class ExploringPolicy(Protocol):
    """Row i depends on observation i and seed i alone, to the last bit; see `MolmoAct2Policy`."""

    @property
    def rows_per_pass(self) -> int: ...

    def prepared(self, observation: RobotObservation) -> RobotObservation: ...

    def answer(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> list[PlainAnswer]: ...

    def explore(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], noise_level: float
    ) -> list[ExploredAnswer]: ...

    def judge(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], flow_samples: int
    ) -> list[ExploredAnswer]: ...

    def speak(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], temperature: float
    ) -> list[SpokenAnswer]: ...


@dataclass(frozen=True)
class CollectedEpisodes:
    """The answers of the episodes that were played, by group, member and chunk; and the episodes that failed."""

    answers: list[Answer]
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
        policy: ExploringPolicy,
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
            bootstrap: episodes that fail are to go on; see `AnswerRecorder.value_after`.
            may_fail: how many episodes; None: `failed_fraction` of them.

        Raises:
            WorkerError: more episodes failed in every attempt.
            DataError: the policy answered with something that is not an action.
        """
        planned = [episode for group in groups for episode in group]
        played: dict[PlannedEpisode, list[Answer]] = {}
        failed: dict[PlannedEpisode, Failure] = {}
        most = int(self._settings.failed_fraction * len(planned)) if may_fail is None else may_fail
        queue = InferenceQueue(self._answers, self._policy.rows_per_pass, self._prepared)

        def attempt(simulator: SimulatorSlot, episode: PlannedEpisode) -> list[Answer]:
            return self._play(simulator, episode, queue, step, version, bootstrap)

        def finish(episode: PlannedEpisode, attempted: AttemptedEpisode[list[Answer]]) -> None:
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

    def _answers(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> Sequence[PlayedAnswer]:
        settings = self._settings
        with self.times.measured("policy") as counted:
            counted["policy/passes"] = 1
            if settings.inference_action_mode == "discrete":
                return self._policy.speak(observations, seeds, settings.temperature)
            if settings.likelihood == "fpo":
                return self._policy.judge(observations, seeds, settings.flow_samples)
            if settings.likelihood == "none":
                return self._policy.answer(observations, seeds)
            return self._policy.explore(observations, seeds, settings.noise_level)

    def _play(
        self,
        simulator: SimulatorSlot,
        planned: PlannedEpisode,
        queue: InferenceQueue[PlayedAnswer],
        step: int,
        version: int,
        bootstrap: bool,
    ) -> list[Answer]:
        def explored(observation: RobotObservation, chunk: int) -> Future[PlayedAnswer]:
            return queue.ask(observation, answer_seed(self._settings, step, planned, chunk))

        recorder, reward = AnswerRecorder(explored), self._settings.reward
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
