"""Playing many episodes at once: players in threads, simulators in processes, and one policy that batches requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from armature.components.contracts.robots import RobotObservation, RobotPolicy
from armature.components.machine.workers.channel import WorkerError
from armature.components.machine.workers.pool import StickyQueue
from armature.components.robots.evaluation.episode import (
    Actions,
    EpisodeOutcome,
    EvaluationJournal,
    LostBesideError,
    PlayedEpisode,
    SimulatorClient,
    play_episode,
)
from armature.components.robots.evaluation.schedule import EpisodeKey, PlannedEpisode, TaskKey, noise_seed
from armature.components.robots.evaluation.settings import PolicyEvaluationSettings
from armature.components.robots.libero.tasks import ACTION_NAMES

# --- One policy for many players: requests that wait at the same time share a forward pass ---

AnswerT = TypeVar("AnswerT")


class EvaluationAborted(Exception):
    """Raised in a player whose evaluation ends because another player or the policy failed."""


@dataclass(frozen=True)
class _Question:
    observation: RobotObservation
    seed: int
    answer: Future[Any] = field(default_factory=Future)


class InferenceQueue(Generic[AnswerT]):
    """Queue of policy requests: players ask from their threads, and the thread that calls `serve` computes.

    One thread computes because torch and CUDA work best that way. Which requests share a batch depends on timing, so
    batches differ between runs. Results do not, because the rows of a RobotPolicy are independent.
    """

    def __init__(
        self,
        predict: Callable[[list[RobotObservation], list[int]], Iterable[AnswerT]],
        rows: int,
        prepare: Callable[[RobotObservation], RobotObservation],
    ) -> None:
        """Create a queue for one policy.

        Args:
            predict: `predict` of a `RobotPolicy`, or another method of it whose rows are independent.
            rows: rows of one call. A call with fewer rows takes equally long, so it waits for more requests while
                other players still play, for at most half the duration of the previous call.
            prepare: `prepared` of the policy. It runs in the player's thread, while the policy computes for others.
        """
        self._predict, self._rows, self._prepare = predict, rows, prepare
        self._questions: SimpleQueue[_Question | Future[None]] = SimpleQueue()
        self._playing, self._patience = 0, 0.0
        self._stopped = False

    def ask(self, observation: RobotObservation, seed: int) -> Future[AnswerT]:
        """Return the future of the answer. Its `result()` raises EvaluationAborted if another thread has failed.

        Raises:
            EvaluationAborted: the evaluation has already ended.
            DataError: see `RobotPolicy.prepared`.
        """
        question = _Question(self._prepare(observation), seed)
        self._questions.put(question)
        if self._stopped:
            raise EvaluationAborted
        return question.answer

    def serve(self, players: list[Callable[[], None]]) -> None:
        """Run each player in a thread and answer requests until all players have ended.

        Raises:
            The first error of a player or of the policy, after the other players have ended.
        """
        with ThreadPoolExecutor(max(1, len(players)), "player") as threads:
            for player in players:
                threads.submit(player).add_done_callback(self._questions.put)
            try:
                self._playing = len(players)
                while self._playing:
                    self._serve_once()
            finally:
                self._stopped = True
                self._refuse()

    def _serve_once(self) -> None:
        """Answer one batch of requests, and count players that have ended."""
        left, questions = self._waiting()
        try:
            for player in left:
                player.result()
            self._answer(questions)
        finally:
            for question in questions:
                if not question.answer.done():
                    question.answer.set_exception(EvaluationAborted())

    def _waiting(self) -> tuple[list[Future[None]], list[_Question]]:
        """Wait for the requests of one policy call. Return the players that have ended while waiting, and the requests.

        After the first request or ended player, more requests are awaited for at most half the duration of the previous
        policy call.
        """
        left, questions = list[Future[None]](), list[_Question]()
        latest = time.monotonic() + self._patience
        while len(questions) < min(self._rows, self._playing):
            others = bool(left or questions)
            try:
                item = self._questions.get(timeout=max(0.0, latest - time.monotonic()) if others else None)
            except Empty:
                break
            if isinstance(item, Future):
                left.append(item)
                self._playing -= 1
            else:
                questions.append(item)
        return left, questions

    def _answer(self, questions: list[_Question]) -> None:
        if not questions:
            return
        began = time.monotonic()
        answers = self._predict([each.observation for each in questions], [each.seed for each in questions])
        self._patience = (time.monotonic() - began) / 2
        for question, answer in zip(questions, answers, strict=True):
            question.answer.set_result(answer)

    def _refuse(self) -> None:
        """Let all requests in the queue fail with EvaluationAborted."""
        while True:
            try:
                waiting = self._questions.get_nowait()
            except Empty:
                return
            if isinstance(waiting, _Question):
                waiting.answer.set_exception(EvaluationAborted())


ResultT = TypeVar("ResultT")


class ProgressCallback(Protocol):
    """Function that is called after each episode. Its arguments are the outcomes of all finished episodes and the
    outcome of the latest one."""

    def __call__(self, finished: Collection[EpisodeOutcome], latest: EpisodeOutcome, /) -> None: ...


@dataclass(frozen=True)
class SimulatorSlot:
    """A simulator that a player uses: slot number `slot` of a process."""

    process: SimulatorClient
    slot: int


def task_of(planned: PlannedEpisode) -> TaskKey:
    """Return the suite and number of the episode's task."""
    return planned.key[:2]


@dataclass(frozen=True)
class AttemptedEpisode(Generic[ResultT]):
    """Result of an episode after one or more attempts.

    result: None if all attempts failed. problem: the last error then. lost: number of attempts in which the simulator
    died. seconds: duration of the last attempt, including waiting for the policy.
    """

    result: ResultT | None
    problem: WorkerError | None
    lost: int
    seconds: float


class EpisodePlayer:
    """Plays planned episodes with players in threads, simulators in processes and one policy.

    Results depend neither on the number of processes nor on `batch`.

    Args:
        batch: number of episodes played at the same time.
        attempts: number of attempts at an episode whose simulator dies. If the shared process dies during another
            slot's call, the attempt is not counted: otherwise it would depend on the neighbors whether an episode
            fails.
    """

    def __init__(self, processes: Sequence[SimulatorClient], batch: int, attempts: int) -> None:
        self._processes, self._batch, self._attempts = processes, batch, attempts
        self._held: dict[SimulatorSlot, TaskKey] = {}
        """Task that each simulator was last built for. Building a simulator for another task takes seconds, so players
        choose episodes of the same task first."""
        self._lock = threading.Lock()

    def play(
        self,
        planned: Sequence[PlannedEpisode],
        queue: InferenceQueue[Any],
        attempt: Callable[[SimulatorSlot, PlannedEpisode], ResultT],
        finish: Callable[[PlannedEpisode, AttemptedEpisode[ResultT]], None],
    ) -> None:
        """Play all episodes.

        Args:
            queue: requests to the policy, used by `attempt`.
            attempt: plays an episode; raises WorkerError if the simulator died.
            finish: called after each episode, by one thread at a time. An error it raises ends the evaluation.
        """
        processes, count = self._processes, min(self._batch, len(planned))
        slots = [SimulatorSlot(processes[i % len(processes)], i // len(processes)) for i in range(count)]
        before = [self._held[slot] for slot in slots if slot in self._held]
        schedule = StickyQueue(planned, task_of, before)

        def play_at(simulator: SimulatorSlot) -> None:
            while (episode := schedule.take(self._held.get(simulator))) is not None:
                self._held[simulator] = task_of(episode)
                attempted = self._repeat(partial(attempt, simulator, episode))
                with self._lock:
                    finish(episode, attempted)

        queue.serve([partial(play_at, simulator) for simulator in slots])

    def _repeat(self, attempt: Callable[[], ResultT]) -> AttemptedEpisode[ResultT]:
        problems: list[WorkerError] = []
        lost = 0
        while True:
            started = time.monotonic()
            try:
                return AttemptedEpisode(attempt(), None, lost, time.monotonic() - started)
            except WorkerError as error:
                problems += [error] * (not isinstance(error, LostBesideError))
                lost += 1
            if len(problems) == self._attempts:
                return AttemptedEpisode(None, problems[-1], lost, time.monotonic() - started)


class ManyPlayer(Protocol):
    """An `EpisodePlayer`, or another way to play planned episodes."""

    def play(
        self,
        planned: Sequence[PlannedEpisode],
        queue: InferenceQueue[Any],
        attempt: Callable[[SimulatorSlot, PlannedEpisode], PlayedEpisode],
        finish: Callable[[PlannedEpisode, AttemptedEpisode[PlayedEpisode]], None],
    ) -> None:
        """See `EpisodePlayer.play`."""


def outcome_of(attempted: AttemptedEpisode[PlayedEpisode]) -> EpisodeOutcome:
    """Return the outcome of an episode that was played, or given up."""
    played, lost, seconds = attempted.result, attempted.lost, attempted.seconds
    if played is not None:
        return EpisodeOutcome(played.success, played.actions, None, lost, seconds)
    nothing = np.zeros((0, len(ACTION_NAMES)), np.float32)
    return EpisodeOutcome(False, nothing, str(attempted.problem), lost, seconds)


class Evaluation:
    """Evaluation of a policy on planned episodes. Finished episodes are read from the journal and not played again.

    Args:
        on_outcome: called after each episode.
    """

    def __init__(
        self,
        settings: PolicyEvaluationSettings,
        planned: Sequence[PlannedEpisode],
        journal: EvaluationJournal,
        on_outcome: ProgressCallback,
    ) -> None:
        self._settings, self._planned, self._journal, self._on_outcome = settings, planned, journal, on_outcome
        self.outcomes: dict[EpisodeKey, EpisodeOutcome] = {}

    def run(self, policy: RobotPolicy, processes: Sequence[SimulatorClient]) -> Mapping[EpisodeKey, EpisodeOutcome]:
        """Return the outcome of every planned episode, played in the simulators of the processes. See `run_with`."""
        return self.run_with(policy, EpisodePlayer(processes, self._settings.batch, self._settings.attempts))

    def run_with(
        self, policy: RobotPolicy, player: ManyPlayer, action_dimensions: int = len(ACTION_NAMES)
    ) -> Mapping[EpisodeKey, EpisodeOutcome]:
        """Return the outcome of every planned episode.

        Raises:
            WorkerError: more than `failed_episodes` episodes could not be played.
            DataError: the policy returned something that is not an action.
        """
        wanted = {planned.key for planned in self._planned}
        journal = self._journal.read().items()
        self.outcomes = {key: outcome for key, outcome in journal if key in wanted and outcome.failure is None}
        left = [planned for planned in self._planned if planned.key not in self.outcomes]
        queue = InferenceQueue(policy.predict, policy.rows_per_pass, policy.prepared)

        def attempt(simulator: SimulatorSlot, planned: PlannedEpisode) -> PlayedEpisode:
            def actor(observation: RobotObservation, chunk: int) -> Actions:
                return queue.ask(observation, noise_seed(self._settings, planned, chunk)).result()

            return play_episode(simulator.process, simulator.slot, planned, actor, action_dimensions=action_dimensions)

        player.play(left, queue, attempt, self._finish)
        return self.outcomes

    def _finish(self, planned: PlannedEpisode, attempted: AttemptedEpisode[PlayedEpisode]) -> None:
        self.outcomes[planned.key] = outcome = outcome_of(attempted)
        failed = sum(each.failure is not None for each in self.outcomes.values())
        if failed > self._settings.failed_episodes:
            raise WorkerError(
                f"{failed} episodes could not be played, at most {self._settings.failed_episodes} may fail: "
                f"{outcome.failure}",
                code="too_many_episodes_failed",
                where=planned.name,
                remedy="see the simulators' logs and start again: finished episodes are kept",
            )
        self._journal.append(planned, outcome)
        self._on_outcome(self.outcomes.values(), outcome)
