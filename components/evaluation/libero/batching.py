"""One policy for many players: those that wait at the same time are answered in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from components.contracts.robots import RobotObservation

AnswerT = TypeVar("AnswerT")


class EvaluationAborted(Exception):
    """Another player or the policy failed; nobody plays on."""


@dataclass(frozen=True)
class _Question:
    observation: RobotObservation
    seed: int
    answer: Future[Any] = field(default_factory=Future)


class InferenceQueue(Generic[AnswerT]):
    """Players ask from their threads; the thread that runs `serve` computes, which torch and CUDA like best.

    Who waits is whoever happens to be ready, so batches differ from run to run; answers do not, because a
    RobotPolicy's rows are independent.
    """

    def __init__(self, predict: Callable[[list[RobotObservation], list[int]], Iterable[AnswerT]], rows: int) -> None:
        """
        Args:
            predict: Of a `RobotPolicy`, or another method of one whose rows are independent.
            rows: Most that are asked at once.
        """
        self._predict, self._rows = predict, rows
        self._questions: SimpleQueue[_Question | Future[None]] = SimpleQueue()
        self._stopped = False
        self.calls, self.answers = 0, 0

    def ask(self, observation: RobotObservation, seed: int) -> AnswerT:
        """
        Raises:
            EvaluationAborted: the evaluation ends with an error of another thread.
        """
        question = _Question(observation, seed)
        self._questions.put(question)
        if self._stopped:
            raise EvaluationAborted
        answer: AnswerT = question.answer.result()
        return answer

    def serve(self, players: list[Callable[[], None]]) -> None:
        """Run each player in a thread and answer them until all have ended.

        Raises:
            The first error of a player or of the policy, after the other players have ended.
        """
        with ThreadPoolExecutor(max(1, len(players)), "player") as threads:
            for player in players:
                threads.submit(player).add_done_callback(self._questions.put)
            try:
                playing = len(players)
                while playing:
                    playing -= self._serve_once()
            finally:
                self._stopped = True
                self._refuse()

    def _serve_once(self) -> int:
        """Answer those that wait. Returns how many players left."""
        waiting = self._waiting()
        left = [each for each in waiting if isinstance(each, Future)]
        questions = [each for each in waiting if isinstance(each, _Question)]
        try:
            for player in left:
                player.result()
            self._answer(questions)
        finally:
            for question in questions:
                if not question.answer.done():
                    question.answer.set_exception(EvaluationAborted())
        return len(left)

    def _waiting(self) -> list[_Question | Future[None]]:
        """Those that wait now, one at least, and no more than the policy takes."""
        waiting = [self._questions.get()]
        while len(waiting) < self._rows:
            try:
                waiting.append(self._questions.get_nowait())
            except Empty:
                break
        return waiting

    def _answer(self, questions: list[_Question]) -> None:
        if not questions:
            return
        answers = self._predict([each.observation for each in questions], [each.seed for each in questions])
        self.calls, self.answers = self.calls + 1, self.answers + len(questions)
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
