"""Whatever a server answers: exact samples, or failures that are counted; through the pool, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import copy
import gzip
import io
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.responses import Response, StreamingResponse

from armature.components.inference.client import Completion, GenerationFailure
from armature.components.inference.pool import ServerPool
from armature.components.inference.requests import AnswerLimits, read_completions
from armature.components.inference.settings import ServerSettings
from tests.builders import make_machine
from tests.inference.conftest import KEY, MESSAGES, SAMPLING, stand_in, write_checkpoint

pytestmark = pytest.mark.waits

PROMPT, TOKENS, ROWS = [1, 7, 7, 7, 2], [3, 4, 5], 10
SAMPLES = 3


class Asked:
    """A pool that has joined one stand-in server. `sample` requests samples, after `rewrite` has changed the server's
    answer."""

    def __init__(self, pool: ServerPool, server: Any, portal: BlockingPortal) -> None:
        self.pool, self.server, self.portal = pool, server, portal

    def sample(self, rewrite: Callable[[dict[str, Any]], Any]) -> list[Completion | GenerationFailure]:
        self.server.rewrite = rewrite
        try:
            return self.portal.call(self.pool.sample, MESSAGES, SAMPLING, 0, SAMPLES)
        except GenerationFailure as failure:
            return [failure] * SAMPLES


@pytest.fixture(scope="module")
def joined(tmp_path_factory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("answers")
    weights = write_checkpoint(folder / "a")
    (weights / "config.json").write_text(json.dumps({"image_token_id": 7, "text_config": {"vocab_size": ROWS}}))
    with pytest.MonkeyPatch.context() as patch, stand_in.run_stand_in(KEY) as server:
        patch.setenv("VLLM_API_KEY", KEY)
        limits = {"generation_timeout": 5.0, "ready_timeout": 5.0, "sync_timeout": 5.0}
        machine = make_machine(endpoints=(server.url,), **limits)
        inference = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")
        pool = ServerPool(weights, inference, machine, folder / "logs")
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(pool):
            yield Asked(pool, server, portal)


@pytest.fixture
def asked(joined) -> Asked:
    """Return `joined` with the pool's counts set to zero."""
    joined.pool.statistics.failures.clear()
    joined.pool.statistics.completions = joined.pool.statistics.ejections = 0
    return joined


def at(answer: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a copy of the answer with `value` at `path`, a sequence of keys and indices. Its choices are sorted by
    index."""
    answer = copy.deepcopy(answer)
    answer["choices"].sort(key=lambda choice: choice["index"])
    where: Any = answer
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = value
    return answer


LOGPROB = ("logprobs", "content", 0, "logprob")
BAD: dict[tuple[str, tuple[Any, ...]], list[Any]] = {
    ("malformed_tokens", ("token_ids",)): [None, [3.0, 4, 5], [True, 4, 5], [[3, 4, 5]], "345"],
    ("unknown_token", ("token_ids",)): [[-1, 4, 5], [3, 4, ROWS], [3, 4, 2**64 + 5]],
    ("length_mismatch", ("token_ids",)): [[3, 4, 5, 6], []],
    ("placeholder_sampled", ("token_ids", 1)): [7],
    ("bad_logprobs", LOGPROB): [None, -9999.0, True, "-0.5", 0.5, -math.inf, math.nan, -(10**400)],
    ("missing_logprobs", LOGPROB[:3]): [-0.5],
    ("missing_logprobs", LOGPROB[:2]): [None],
    ("missing_logprobs", LOGPROB[:1]): [[]],
    ("malformed_text", ("message",)): [None],
    ("malformed_text", ("message", "content")): [3, "a \ud800 b"],
    ("not_finished", ("finish_reason",)): [None, "abort", "\ud800"],
}
BAD_IN_ONE = [(path, value, reason) for (reason, path), values in BAD.items() for value in values]


@pytest.mark.parametrize(("path", "value", "reason"), BAD_IN_ONE)
def test_malformed_sample_fails_alone(path, value, reason, asked):
    good, bad, last = asked.sample(lambda answer: at(answer, ("choices", 1, *path), value))
    for sample in (good, last):
        assert isinstance(sample, Completion)
        assert (sample.token_ids.tolist(), sample.prompt_token_ids.tolist()) == (TOKENS, PROMPT)
    assert isinstance(bad, GenerationFailure)
    assert bad.reason == reason
    assert asked.pool.statistics.failures == {reason: 1}
    assert asked.pool.statistics.completions == 2
    str(bad).encode()


BAD_IN_ALL: dict[tuple[Any, ...], list[Any]] = {
    ("prompt_token_ids",): [None, [1.5, 7], [1, ROWS], [True], [], [1] * 512],
    ("choices", 2, "index"): [1, 3, 2.0],
    ("choices", 1, "index"): [True],
    ("choices", 2): [None],
    ("choices",): [[], {}],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, bad in BAD_IN_ALL.items() for value in bad])
def test_reply_with_ambiguous_samples_fails_all(path, value, asked):
    failures = asked.sample(lambda answer: at(answer, path, value))
    assert {failure.reason for failure in failures if isinstance(failure, GenerationFailure)} == {"malformed_answer"}
    assert asked.pool.statistics.failures == {"malformed_answer": SAMPLES}
    assert asked.pool.statistics.ejections == 0


class Endless:
    """A response body of 200 MiB, more than a client should read. `taken` counts the bytes that were sent."""

    def __init__(self, part: bytes) -> None:
        self.part, self.taken = part, 0

    async def __aiter__(self) -> Any:
        while self.taken < 200 * 2**20:
            self.taken += len(self.part)
            yield self.part
            await asyncio.sleep(0)  # here the server may notice that nobody listens


def test_endless_reply_is_cut_off(asked):
    endless: list[Endless] = []

    def rewrite(_: dict[str, Any]) -> Response:
        endless.append(Endless(b" " * 2**16))
        return StreamingResponse(endless[-1], media_type="application/json")

    failures = asked.sample(rewrite)
    assert {failure.reason for failure in failures if isinstance(failure, GenerationFailure)} == {"broken_answer"}
    assert max(answer.taken for answer in endless) < 32 * 2**20  # what lies in sockets and buffers is in it


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (gzip.compress(bytes(50 * 2**20)), {"content-encoding": "gzip"}),
        (b"[" * 50_000, {}),
        (b"\xff\xfe{}", {}),
        (b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", {}),
    ],
    ids=["bomb", "nested", "no text", "a long number"],
)
def test_non_json_reply_is_a_failure(content, headers, asked):
    failures = asked.sample(lambda _: Response(content, headers=headers))
    assert {failure.reason for failure in failures if isinstance(failure, GenerationFailure)} == {"broken_answer"}
    assert asked.pool.statistics.failures == {"broken_answer": SAMPLES}
    assert len(str(failures[0])) < 2000


EXPERTS, LAYERS, CHOSEN = 5, 2, 3


def encoded(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def with_experts(value: Any) -> Completion | GenerationFailure:
    """Read an answer with one sample, to which a server has added `value` as its tokens' experts."""
    answer = stand_in.StandIn(KEY)._answer({"n": 1})
    answer["choices"][0]["routed_experts"] = value
    limits = AnswerLimits(ROWS, ROWS, frozenset(), 512, (), (EXPERTS, LAYERS, CHOSEN))
    (sample,) = read_completions(answer, limits, n=1, max_tokens=3, version=0, server="s", seconds=0.0)
    return sample


ROUTES = np.arange((len(PROMPT) + len(TOKENS) - 1) * LAYERS * CHOSEN).reshape(-1, LAYERS, CHOSEN) % EXPERTS


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_answer_has_experts_of_all_tokens_but_the_last(kind):
    sample = with_experts(encoded(ROUTES.astype(kind)))
    assert sample.experts.tolist() == ROUTES.tolist()


@pytest.mark.parametrize(
    "value",
    [
        *(None, 3, "", "?", encoded(ROUTES.astype(np.uint8))[:-4]),
        *(encoded(ROUTES), encoded(ROUTES[1:].astype(np.uint8)), encoded(ROUTES[:, 1:].astype(np.uint8))),
        *(encoded((ROUTES + 1).astype(np.uint8)), encoded(np.array([{}], dtype=object))),
    ],
    ids=["null", "number", "empty", "no base64", "cut", "signed", "tokens", "layers", "unknown expert", "pickle"],
)
def test_answer_without_valid_experts_is_a_failed_sample(value):
    sample = with_experts(value)
    assert isinstance(sample, GenerationFailure)
    assert sample.reason == "bad_experts"
