"""Makes one request of several that differ in their seeds alone, such as the first turns of a group."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from armature.components.inference.client import Completion, GenerationFailure, Message, Sampling

WINDOW = 0.02
"""Seconds that a request waits for others with the same prompt."""

Results = list[Completion | GenerationFailure]
Sample = Callable[[Sequence[Message], Sampling, int, int], Awaitable[Results]]


@dataclass
class _Prompt:
    """Requests for one prompt that wait to be sent."""

    messages: list[Message]
    sampling: Sampling
    waiting: list[tuple[int, asyncio.Future[Completion]]] = field(default_factory=list)


class RequestMerger:
    """Answers single requests through `sample(messages, sampling, seed, n)`.

    vLLM gives sample i of a request the seed `seed + i`, so requests whose seeds follow one another are answered
    by one request exactly as they would be one by one, while prompt and image are processed once.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._prompts: dict[tuple[str, Sampling], _Prompt] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def complete(self, messages: Sequence[Message], sampling: Sampling, seed: int) -> Completion:
        """One sample; raises what `sample` raises or gives in its place."""
        loop = asyncio.get_running_loop()
        key = (json.dumps(list(messages)), sampling)
        if key not in self._prompts:
            # A copy: a conversation may grow as soon as one of its members is answered.
            self._prompts[key] = _Prompt(json.loads(key[0]), sampling)
            loop.call_later(WINDOW, self._send, key)
        future: asyncio.Future[Completion] = loop.create_future()
        self._prompts[key].waiting.append((seed, future))
        return await future

    def _send(self, key: tuple[str, Sampling]) -> None:
        prompt = self._prompts.pop(key)
        runs: list[list[tuple[int, asyncio.Future[Completion]]]] = []
        for seed, future in sorted(prompt.waiting, key=lambda entry: entry[0]):
            if future.cancelled():
                continue
            if runs and seed == runs[-1][-1][0] + 1:
                runs[-1].append((seed, future))
            else:
                runs.append([(seed, future)])
        for run in runs:
            task = asyncio.get_running_loop().create_task(self._answer(prompt, run))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for _, future in run:
                future.add_done_callback(partial(_cancel_if_unwanted, task, run))

    async def _answer(self, prompt: _Prompt, run: list[tuple[int, asyncio.Future[Completion]]]) -> None:
        try:
            results = await self._sample(prompt.messages, prompt.sampling, run[0][0], len(run))
        except asyncio.CancelledError:
            for _, future in run:
                future.cancel()
            raise
        except Exception as error:
            # Whatever it is belongs to those who asked.
            for _, future in run:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(run, results, strict=True):
            if future.done():
                continue
            if isinstance(result, GenerationFailure):
                future.set_exception(result)
            else:
                future.set_result(result)


def _cancel_if_unwanted(
    task: asyncio.Task[None],
    run: list[tuple[int, asyncio.Future[Completion]]],
    _: asyncio.Future[Completion],
) -> None:
    if all(future.cancelled() for _, future in run):
        task.cancel()
