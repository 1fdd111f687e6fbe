"""Requests that wait for the policy: a bounded queue, answered several at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import ArmatureError, ServerError
from armature.components.contracts.robots import RobotObservation, RobotPolicy

log = logging.getLogger(__name__)
Chunk = NDArray[np.float32]


class BusyError(ServerError):
    """As many requests wait as may wait."""

    code = "busy"


@dataclass(frozen=True)
class ChunkAnswer:
    """actions: (n_action_steps, action dimensions). rows: answered at once. Seconds in the queue, and of the policy."""

    actions: Chunk
    rows: int
    waited: float
    computed: float


@dataclass(frozen=True, eq=False)
class _Waiting:
    observation: RobotObservation
    seed: int
    answer: asyncio.Future[ChunkAnswer]
    since: float = field(default_factory=time.monotonic)


class PolicyQueue:
    """Asked by coroutines of one event loop, answered in a thread of its own, as torch and CUDA like best.

    Who waits is whoever happened to come, so batches differ from run to run; answers do not, because a RobotPolicy's
    rows are independent.

    healthy: False from a failure of the policy's own on, until it answers again.
    """

    def __init__(self, policy: RobotPolicy, batch: int, most_waiting: int) -> None:
        """
        Args:
            batch: Requests that are answered at once, at most.
            most_waiting: Requests that wait while others are answered, at most.
        """
        self._policy, self._batch, self._most_waiting = policy, batch, most_waiting
        self._waiting: deque[_Waiting] = deque()
        self._some = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "policy")
        self.healthy = True

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def ask(self, observation: RobotObservation, seed: int) -> ChunkAnswer:
        """Whoever cancels this waits no longer.

        Raises:
            BusyError: the queue is full.
            ArmatureError: the policy cannot answer this observation.
        """
        if len(self._waiting) >= self._most_waiting:
            raise BusyError(
                f"busy, {len(self._waiting)} waiting",
                remedy="ask again later, or start the server with a larger --max-waiting or more servers",
            )
        question = _Waiting(observation, seed, asyncio.get_running_loop().create_future())
        self._waiting.append(question)
        self._some.set()
        try:
            return await question.answer
        finally:
            with suppress(ValueError):
                self._waiting.remove(question)

    async def run(self) -> None:
        """Answer until it is cancelled; what is being computed then is finished."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._some.wait()
                taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
                if not self._waiting:
                    self._some.clear()
                if taken:
                    began = time.monotonic()
                    chunks = await loop.run_in_executor(self._thread, self._answers, taken)
                    self._tell(taken, chunks, began)
        finally:
            self._thread.shutdown()

    def _tell(self, taken: Sequence[_Waiting], chunks: Sequence[Chunk | ArmatureError], began: float) -> None:
        computed = time.monotonic() - began
        for question, chunk in zip(taken, chunks, strict=True):
            if question.answer.done():
                continue
            if isinstance(chunk, ArmatureError):
                question.answer.set_exception(chunk)
            else:
                question.answer.set_result(ChunkAnswer(chunk, len(taken), began - question.since, computed))

    def _answers(self, taken: Sequence[_Waiting]) -> list[Chunk | ArmatureError]:
        """Of each its actions or what is wrong with it; in the policy's thread."""
        try:
            answer = self._policy.predict([each.observation for each in taken], [each.seed for each in taken])
            chunks = np.asarray(answer, np.float32)
        except Exception as error:
            if len(taken) > 1:  # a row's error is its own
                return [answer for each in taken for answer in self._answers([each])]
            if isinstance(error, ArmatureError):
                return [error]
            log.exception("the policy failed")
            self.healthy = False
            return [
                ServerError(
                    f"the policy failed: {type(error).__name__}", code="policy_failed", remedy="see the server's log"
                )
            ]
        expected = (len(taken), self._policy.n_action_steps, self._policy.action_dimensions)
        self.healthy = chunks.shape == expected
        if not self.healthy:
            return [
                ServerError(f"the policy's answer has the shape {chunks.shape}, not {expected}", code="policy_failed")
            ] * len(taken)
        return [chunk if np.isfinite(chunk).all() else _not_finite(chunk) for chunk in chunks]


def _not_finite(chunk: Chunk) -> ServerError:
    step, dimension = np.argwhere(~np.isfinite(chunk))[0]
    return ServerError(
        f"the policy's action {step} has {chunk[step, dimension]} in dimension {dimension}: nothing to give a robot",
        code="policy_answer_not_finite",
        remedy="look at the checkpoint: its weights or statistics are damaged",
    )
