"""A bounded queue of requests to the policy, which computes several of them together."""

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
    """A request is refused, because the queue of requests to the policy is full."""

    code = "busy"


@dataclass(frozen=True)
class ServedChunk:
    """A predicted chunk with its timing.

    actions: (n_action_steps, action dimensions) float32.
    rows: number of requests that were computed together.
    waited: seconds that the request was in the queue.
    computed: seconds that the prediction of all `rows` took.
    """

    actions: Chunk
    rows: int
    waited: float
    computed: float


@dataclass(frozen=True, eq=False)
class _Waiting:
    observation: RobotObservation
    seed: int
    answer: asyncio.Future[ServedChunk]
    since: float = field(default_factory=time.monotonic)


class PolicyQueue:
    """Takes requests from coroutines of one event loop and predicts in a single thread, as torch and CUDA need.

    A batch consists of the requests that happen to be in the queue, so batches differ from run to run. The predictions
    do not, because the rows of a `RobotPolicy` are independent.

    healthy: False after a failure of the policy, until it predicts again.
    """

    def __init__(self, policy: RobotPolicy, batch: int, most_waiting: int) -> None:
        """
        Args:
            batch: Largest number of requests to compute together.
            most_waiting: Largest number of requests in the queue.
        """
        self._policy, self._batch, self._most_waiting = policy, batch, most_waiting
        self._waiting: deque[_Waiting] = deque()
        self._some = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "policy")
        self.healthy = True

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    async def ask(self, observation: RobotObservation, seed: int) -> ServedChunk:
        """Wait for the prediction for an observation; cancelling the call removes the request from the queue.

        Raises:
            BusyError: the queue is full.
            ArmatureError: the policy cannot predict for this observation.
        """
        if len(self._waiting) >= self._most_waiting:
            raise BusyError(
                f"busy, {len(self._waiting)} waiting",
                remedy="ask again later, or start the server with a larger --max-waiting or more servers",
            )
        request = _Waiting(observation, seed, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._some.set()
        try:
            return await request.answer
        finally:
            with suppress(ValueError):
                self._waiting.remove(request)

    async def run(self) -> None:
        """Answer requests until the task is cancelled; a prediction in progress is finished first."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._some.wait()
                taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
                if not self._waiting:
                    self._some.clear()
                if not taken:
                    continue
                began = time.monotonic()
                chunks = await loop.run_in_executor(self._thread, self._predict, taken)
                computed = time.monotonic() - began
                for request, chunk in zip(taken, chunks, strict=True):
                    if request.answer.done():
                        continue
                    if isinstance(chunk, ArmatureError):
                        request.answer.set_exception(chunk)
                    else:
                        request.answer.set_result(ServedChunk(chunk, len(taken), began - request.since, computed))
        finally:
            self._thread.shutdown()

    def _predict(self, taken: Sequence[_Waiting]) -> list[Chunk | ArmatureError]:
        """Predict a chunk for each request; a request that fails gets an error in its place.

        This method runs in the policy's thread.
        """
        try:
            predicted = self._policy.predict([each.observation for each in taken], [each.seed for each in taken])
            chunks = np.asarray(predicted, np.float32)
        except Exception as error:
            if len(taken) > 1:  # predict one by one, so that only the failing request gets the error
                return [chunk for each in taken for chunk in self._predict([each])]
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
                ServerError(f"the policy's actions have the shape {chunks.shape}, not {expected}", code="policy_failed")
            ] * len(taken)
        return [chunk if np.isfinite(chunk).all() else _not_finite(chunk) for chunk in chunks]


def _not_finite(chunk: Chunk) -> ServerError:
    step, dimension = np.argwhere(~np.isfinite(chunk))[0]
    return ServerError(
        f"the policy's action {step} has {chunk[step, dimension]} in dimension {dimension}, which no robot can execute",
        code="policy_answer_not_finite",
        remedy="check the checkpoint: its weights or statistics are damaged",
    )
