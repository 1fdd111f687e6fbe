"""Requests that differ in their seeds alone share one; each gets the answer of its own seed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.components.inference.client import Completion, GenerationFailure
from armature.components.inference.requests import RequestMerger
from armature.components.inference.settings import SamplingSettings
from tests.inference.conftest import make_sampling


def completion(prompt: str, seed: int) -> Completion:
    ids = np.array([seed], np.int32)
    return Completion(ids, ids, np.zeros(1, np.float32), prompt, "stop", 0, "s", 0.0)


class Recorder:
    """A replacement of a server whose samples depend only on the prompt and the seed. It records every request."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int, int]] = []
        self.cancelled = 0

    async def sample(
        self, messages: Sequence[Any], sampling: SamplingSettings, seed: int, n: int, tools: Sequence[Any]
    ) -> list[Any]:
        prompt = messages[0]["content"]
        self.requests.append((prompt, seed, n))
        try:
            await asyncio.sleep(0.01 if prompt != "slow" else 5)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if prompt == "refused":
            raise GenerationFailure("no", reason="request_refused")
        failure = GenerationFailure("nan", reason="bad_logprobs")
        return [failure if prompt == "odd" and s % 2 else completion(prompt, s) for s in range(seed, seed + n)]


def message(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def ask(*jobs: tuple[str, int], temperatures: tuple[float, ...] = (1.0,)) -> tuple[Recorder, list[Any]]:
    recorder = Recorder()

    async def run() -> list[Any]:
        merger = RequestMerger(recorder.sample)
        temperature = itertools.cycle(temperatures)
        calls = [
            merger.complete(message(prompt), SamplingSettings(temperature=next(temperature), max_tokens=3), seed)
            for prompt, seed in jobs
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    return recorder, asyncio.run(run())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), min_size=1, max_size=20))
def test_each_request_gets_the_sample_of_its_seed(jobs):
    recorder, results = ask(*jobs)
    assert [(result.text, int(result.token_ids[0])) for result in results] == jobs
    asked = [(prompt, seed) for prompt, first, n in recorder.requests for seed in range(first, first + n)]
    assert sorted(asked) == sorted(jobs)


def test_group_is_one_request():
    recorder, _ = ask(*(("a", seed) for seed in (7, 5, 6, 8)), ("b", 9), ("a", 20))
    assert sorted(recorder.requests) == [("a", 5, 4), ("a", 20, 1), ("b", 9, 1)]


def test_different_sampling_is_a_separate_request():
    recorder, _ = ask(("a", 1), ("a", 2), temperatures=(1.0, 0.5))
    assert sorted(recorder.requests) == [("a", 1, 1), ("a", 2, 1)]


def test_failure_reaches_only_its_requests():
    _, results = ask(("odd", 0), ("odd", 1), ("odd", 2), ("refused", 0), ("refused", 1))
    reasons = [getattr(result, "reason", "") for result in results]
    assert reasons == ["", "bad_logprobs", "", "request_refused", "request_refused"]


@pytest.mark.parametrize("keep", [0, 1])
def test_abandoned_request_is_cancelled(keep):
    recorder = Recorder()

    async def run() -> None:
        merger = RequestMerger(recorder.sample)
        tasks = [asyncio.create_task(merger.complete(message("slow"), make_sampling(), seed)) for seed in range(3)]
        await asyncio.sleep(0.1)
        for task in tasks[keep:]:
            task.cancel()
        await asyncio.sleep(0.05)
        assert recorder.cancelled == (keep == 0)

    asyncio.run(run())
    assert recorder.requests == [("slow", 0, 3)]
