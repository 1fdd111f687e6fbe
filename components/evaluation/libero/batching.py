"""One policy for many players: those that wait at the same time are answered in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from armature.components.contracts.robots import RobotObservation

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
