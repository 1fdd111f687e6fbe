"""Many episodes: players in threads, simulators in processes, one policy; and those of an evaluation."""

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
from armature.components.robots.evaluation.settings import LiberoEvaluationSettings
from armature.components.robots.libero.tasks import ACTION_NAMES

# One policy for many players: those that wait at the same time are answered in one call.

AnswerT = TypeVar("AnswerT")


class EvaluationAborted(Exception):
    """Another player or the policy failed; nobody plays on."""


@dataclass(frozen=True)
class _Question:
    observation: RobotObservation
    seed: int
    answer: Future[Any] = field(default_factory=Future)


class InferenceQueue(Generic[AnswerT]):
    """Players prepare and ask from their threads; the thread of `serve` computes, which torch and CUDA like best.

    Who waits is whoever happens to be ready, so batches differ from run to run; answers do not, because a
    RobotPolicy's rows are independent.
    """

    def __init__(
        self,
        predict: Callable[[list[RobotObservation], list[int]], Iterable[AnswerT]],
        rows: int,
        prepare: Callable[[RobotObservation], RobotObservation],
    ) -> None:
        """
        Args:
            predict: Of a `RobotPolicy`, or another method of one whose rows are independent.
            prepare: `prepared` of the policy, which works while it computes answers to others.
            rows: Of a call. One with fewer takes as long, so it waits for more while others play, for at most half the
                time that the call before it took.
        """
        self._predict, self._rows, self._prepare = predict, rows, prepare
        self._questions: SimpleQueue[_Question | Future[None]] = SimpleQueue()
        self._playing, self._patience = 0, 0.0
        self._stopped = False

    def ask(self, observation: RobotObservation, seed: int) -> Future[AnswerT]:
        """The answer, when it comes. Its `result()` raises EvaluationAborted when another thread ended with an error.

        Raises:
            EvaluationAborted: it has ended already.
            DataError: see `RobotPolicy.prepared`.
        """
        question = _Question(self._prepare(observation), seed)
        self._questions.put(question)
        if self._stopped:
            raise EvaluationAborted
        return question.answer

    def serve(self, players: list[Callable[[], None]]) -> None:
        """Run each player in a thread and answer them until all have ended.

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
        """Answer those that wait, and count those that left."""
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
        """Players that left, and questions for a call; one of them at least."""
        left, questions = list[Future[None]](), list[_Question]()
        latest = time.monotonic() + self._patience
        while len(questions) < min(self._rows, self._playing):
            others = bool(left or questions)
            try:
                found = self._questions.get(timeout=max(0.0, latest - time.monotonic()) if others else None)
            except Empty:
                break
            if isinstance(found, Future):
                left.append(found)
                self._playing -= 1
            else:
                questions.append(found)
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
        while True:
            try:
                waiting = self._questions.get_nowait()
            except Empty:
                return
            if isinstance(waiting, _Question):
                waiting.answer.set_exception(EvaluationAborted())


ResultT = TypeVar("ResultT")


class ProgressCallback(Protocol):
    """Called after each episode: what became of all that are finished, and of this one."""

    def __call__(self, finished: Collection[EpisodeOutcome], latest: EpisodeOutcome, /) -> None: ...


@dataclass(frozen=True)
class SimulatorSlot:
    """Where a player plays: a simulator of a process."""

    arena: SimulatorClient
    slot: int


def simulator_slots(arenas: Sequence[SimulatorClient], count: int) -> list[SimulatorSlot]:
    """`count` simulators, spread evenly over the processes."""
    return [SimulatorSlot(arenas[i % len(arenas)], i // len(arenas)) for i in range(count)]


def task_of(planned: PlannedEpisode) -> TaskKey:
    return planned.key[:2]


@dataclass(frozen=True)
class AttemptedEpisode(Generic[ResultT]):
    """The result of an episode, None if all attempts failed, and then the last `problem`.

    lost: attempts that ended with the simulator. seconds: of the last attempt, waiting for the policy included.
    """

    result: ResultT | None
    problem: WorkerError | None
    lost: int
    seconds: float


class EpisodePlayer:
    """Plays planned episodes: players in threads, simulators in processes, one policy that answers those that wait.

    No result depends on the number of arenas or on `batch`.

    Args:
        batch: episodes that are played at once.
        attempts: how often an episode is begun whose simulator dies on the way. If the process was lost during
            another slot's call, the attempt is not counted: whether an episode fails would else depend on its
            neighbors.
    """

    def __init__(self, arenas: Sequence[SimulatorClient], batch: int, attempts: int) -> None:
        self._arenas, self._batch, self._attempts = arenas, batch, attempts
        self._held: dict[SimulatorSlot, TaskKey] = {}
        """The task that each simulator was built for: building one takes seconds."""
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
            queue: the policy, which `attempt` asks.
            attempt: plays an episode; raises WorkerError if the simulator was lost.
            finish: is called after each episode, by one thread at a time. What it raises ends all.
        """
        slots = simulator_slots(self._arenas, min(self._batch, len(planned)))
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


class Evaluation:
    """Plays what the journal does not have yet, and writes it there."""

    def __init__(
        self,
        settings: LiberoEvaluationSettings,
        planned: Sequence[PlannedEpisode],
        journal: EvaluationJournal,
        told: ProgressCallback,
    ) -> None:
        self._settings, self._planned, self._journal, self._told = settings, planned, journal, told
        self.outcomes: dict[EpisodeKey, EpisodeOutcome] = {}

    def run(self, policy: RobotPolicy, arenas: Sequence[SimulatorClient]) -> Mapping[EpisodeKey, EpisodeOutcome]:
        """Return the outcome of every planned episode.

        Raises:
            WorkerError: more episodes than `failed_episodes` could not be played.
            DataError: the policy answered with something that is not an action.
        """
        wanted = {planned.key for planned in self._planned}
        known = self._journal.read().items()
        self.outcomes = {key: outcome for key, outcome in known if key in wanted and outcome.failure is None}
        left = [planned for planned in self._planned if planned.key not in self.outcomes]
        queue = InferenceQueue(policy.predict, policy.rows_per_pass, policy.prepared)

        def attempt(simulator: SimulatorSlot, planned: PlannedEpisode) -> PlayedEpisode:
            def actor(observation: RobotObservation, chunk: int) -> Actions:
                return queue.ask(observation, noise_seed(self._settings, planned, chunk)).result()

            return play_episode(simulator.arena, simulator.slot, planned, actor)

        EpisodePlayer(arenas, self._settings.batch, self._settings.attempts).play(left, queue, attempt, self._finish)
        return self.outcomes

    def _finish(self, planned: PlannedEpisode, attempted: AttemptedEpisode[PlayedEpisode]) -> None:
        played, lost, seconds = attempted.result, attempted.lost, attempted.seconds
        if played is not None:
            outcome = EpisodeOutcome(played.success, played.actions, None, lost, seconds)
        else:
            nothing = np.zeros((0, len(ACTION_NAMES)), np.float32)
            outcome = EpisodeOutcome(False, nothing, str(attempted.problem), lost, seconds)
        self.outcomes[planned.key] = outcome
        failed = sum(each.failure is not None for each in self.outcomes.values())
        if failed > self._settings.failed_episodes:
            raise WorkerError(
                f"{failed} episodes could not be played, {self._settings.failed_episodes} may fail: {outcome.failure}",
                code="too_many_episodes_failed",
                where=planned.name,
                remedy="see the simulators' logs; finished episodes are kept, the next attempt resumes from them",
            )
        self._journal.append(planned, outcome)
        self._told(self.outcomes.values(), outcome)
