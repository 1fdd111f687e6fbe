"""Send requests to servers and validate their answers. Used by the pool, and by workers with direct access."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import reprlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from armature.components.contracts.rollouts import MAX_LOGPROB, Experts, TokenIds
from armature.components.inference.client import (
    Completion,
    GenerationFailure,
    Message,
    Sampling,
    TransientError,
    ask,
    open_session,
    refuse_placeholders,
    request_body,
)
from armature.components.inference.replica import Replica
from armature.components.inference.routing import Router
from armature.components.inference.tool_calls import ToolFormat

# --- Validation of answers: the rest of the code relies on these checks ---

FINISHED = frozenset({"stop", "length"})
"""Finish reasons of a complete sample."""

_PER_TOKEN, _PER_PROMPT_TOKEN, _BASE = 1024, 16, 2**16


@dataclass(frozen=True)
class AnswerLimits:
    """The limits of a valid answer.

    Attributes:
        sampled: number of rows of the output head; sampled ids are below it.
        prompt: number of rows of the embedding; ids of a prompt are below it.
        forbidden: token ids that are never sampled.
        max_model_len: most tokens of a prompt and its completion together.
        placeholders: texts of image placeholder tokens, which no text of a prompt may contain.
        experts: three numbers if the answer has the experts of its tokens: experts of a layer, layers, and experts of a
            token.
    """

    sampled: int
    prompt: int
    forbidden: frozenset[int]
    max_model_len: int
    placeholders: tuple[str, ...] = ()
    experts: tuple[int, int, int] | None = None

    def answer_bytes(self, n: int, max_tokens: int) -> int:
        """Return the size of the longest valid answer to a request for `n` samples, in bytes.

        A sampled token takes about 110 bytes (its id, text, bytes and log-prob), and up to 800 for the longest tokens
        of published vocabularies; a token of the prompt takes its id only. In each sample, all tokens
        have their experts in base64.
        """
        tokens = _PER_PROMPT_TOKEN + (0 if self.experts is None else n * 3 * self.experts[1] * self.experts[2])
        return _BASE + self.max_model_len * tokens + n * min(max_tokens, self.max_model_len) * _PER_TOKEN


def read_completions(
    answer: Mapping[str, Any],
    bounds: AnswerLimits,
    *,
    n: int,
    max_tokens: int,
    version: int,
    server: str,
    seconds: float,
) -> list[Completion | GenerationFailure]:
    """Return the n samples of an answer in order, with a failure in place of each invalid sample.

    Raises:
        GenerationFailure: the answer as a whole is malformed.
    """
    try:
        prompt = _token_ids(answer.get("prompt_token_ids"), bounds.prompt)
        choices = _in_order(answer.get("choices"), n)
        if not 0 < prompt.size < bounds.max_model_len:
            limit = f"inference.max_model_len = {bounds.max_model_len}"
            raise _InvalidAnswer("malformed_answer", f"the prompt has {prompt.size} tokens, {limit}")
    except _InvalidAnswer as wrong:
        raise GenerationFailure(
            f"prompt_token_ids or choices are malformed: {wrong.what}",
            reason="malformed_answer",
            where=server,
            remedy="use a server of vLLM >= 0.26 that serves the run's model",
        ) from None
    results: list[Completion | GenerationFailure] = []
    for index, choice in enumerate(choices):
        try:
            results.append(_completion(choice, prompt, bounds, max_tokens, version, server, seconds))
        except _InvalidAnswer as wrong:
            results.append(GenerationFailure(wrong.what, reason=wrong.reason, where=f"{server}, choice {index}"))
    return results


class _InvalidAnswer(Exception):
    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason, self.what = reason, what


def _in_order(choices: Any, n: int) -> list[dict[str, Any]]:
    """Return an answer's choices sorted by index. Raise _InvalidAnswer unless the indices are 0 to n - 1, each once."""
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise _InvalidAnswer("malformed_answer", f"choices are not a list of objects: {_show(choices)}")
    indices = [choice.get("index") for choice in choices]
    if not all(type(index) is int for index in indices) or sorted(indices) != list(range(n)):
        raise _InvalidAnswer(
            "malformed_answer", f"{len(choices)} choices with the indices {_show(indices)} instead of {n}"
        )
    return sorted(choices, key=lambda choice: int(choice["index"]))


def _completion(
    choice: dict[str, Any],
    prompt: TokenIds,
    bounds: AnswerLimits,
    max_tokens: int,
    version: int,
    server: str,
    seconds: float,
) -> Completion:
    tokens = _token_ids(choice.get("token_ids"), bounds.sampled)
    values = _logprobs(choice.get("logprobs"))
    if len(values) != tokens.size:
        raise _InvalidAnswer("length_mismatch", f"{tokens.size} token ids but {len(values)} log-probs")
    if tokens.size == 0:
        raise _InvalidAnswer("empty_completion", "no token was sampled")
    if tokens.size > max_tokens or prompt.size + tokens.size > bounds.max_model_len:
        raise _InvalidAnswer(
            "length_mismatch",
            f"{tokens.size} tokens were sampled after {prompt.size}: max_tokens = {max_tokens}, "
            f"inference.max_model_len = {bounds.max_model_len}",
        )
    if sampled := bounds.forbidden.intersection(tokens.tolist()):
        raise _InvalidAnswer("placeholder_sampled", f"placeholder tokens {sorted(sampled)} were sampled")
    finish_reason = choice.get("finish_reason")
    if not isinstance(finish_reason, str) or finish_reason not in FINISHED:
        raise _InvalidAnswer("not_finished", f"the sample is incomplete: its finish reason is {_show(finish_reason)}")
    # vLLM writes -9999 for minus infinity. The comparison is false for NaN.
    if bad := [value for value in values if not -9000 < value <= MAX_LOGPROB]:
        raise _InvalidAnswer("bad_logprobs", f"invalid log-probs: {_show(bad)}")
    logprobs = np.minimum(np.asarray(values, dtype=np.float32), np.float32(0.0))
    experts = None if bounds.experts is None else _experts(choice, prompt.size + tokens.size - 1, bounds.experts)
    return Completion(prompt, tokens, logprobs, _text(choice), finish_reason, version, server, seconds, experts)


def _experts(choice: dict[str, Any], tokens: int, layout: tuple[int, int, int]) -> Experts:
    """Return the experts of a sample's tokens, (tokens, layers, k). They are an .npy file in base64."""
    experts, *shape = layout
    try:
        data = base64.b64decode(choice.get("routed_experts", ""), validate=True)
        file = io.BytesIO(data)
        np.lib.format.read_magic(file)
        stored, _, dtype = np.lib.format.read_array_header_1_0(file)
        if stored != (tokens, *shape) or dtype.str not in ("|u1", "<u2"):
            raise _InvalidAnswer("bad_experts", f"{tokens} tokens have experts of shape {stored}, {dtype}")
        array = np.frombuffer(data, dtype, offset=file.tell()).reshape(stored)
    except (TypeError, ValueError) as error:
        raise _InvalidAnswer("bad_experts", f"the answer has no experts of its tokens: {_show(error)}") from None
    if array.max(initial=0) >= experts:
        raise _InvalidAnswer("bad_experts", f"there is no expert {array.max()}: a layer has {experts}")
    return array


def _token_ids(values: Any, rows: int) -> TokenIds:
    """Return the token ids `values` as an array, (T,) int32. Raise _InvalidAnswer unless they are a list of integers
    in [0, rows)."""
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise _InvalidAnswer("malformed_tokens", f"token ids are not a list of integers: {_show(values)}")
    if bad := [value for value in values if not 0 <= value < rows]:
        raise _InvalidAnswer("unknown_token", f"token ids outside of the model's {rows}: {_show(bad)}")
    return np.asarray(values, dtype=np.int32)


def _logprobs(logprobs: Any) -> list[int | float]:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise _InvalidAnswer("missing_logprobs", f"the answer has no list of log-probs: {_show(logprobs)}")
    values = [entry.get("logprob") for entry in content]
    if any(type(value) not in (int, float) for value in values):
        raise _InvalidAnswer("bad_logprobs", f"invalid log-probs: {_show(values)}")
    return values


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a sample. vLLM writes null for a sample of end tokens alone; its text is empty."""
    message = choice.get("message")
    text = message.get("content", 0) if isinstance(message, dict) else 0
    if text is None:
        return ""
    if not isinstance(text, str):
        raise _InvalidAnswer("malformed_text", f"the message has no text: {_show(message)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _InvalidAnswer("malformed_text", f"the text is not valid Unicode: {error.reason}") from None
    return text


def _show(value: Any) -> str:
    """Return a shortened text of any value for messages, so that a huge or hostile answer cannot flood a log."""
    return reprlib.repr(value)


# --- Merging requests that differ only in their seeds, such as the first turns of a group ---

WINDOW = 0.02
"""Seconds that a request waits for other requests with the same prompt, to be sent together with them."""

Results = list[Completion | GenerationFailure]
Schemas = Sequence[Mapping[str, Any]]
Sample = Callable[[Sequence[Message], Sampling, int, int, Schemas], Awaitable[Results]]


@dataclass
class _Prompt:
    """Requests with the same prompt that wait to be sent together."""

    messages: list[Message]
    sampling: Sampling
    tools: Schemas
    waiting: list[tuple[int, asyncio.Future[Completion]]] = field(default_factory=list)


class RequestMerger:
    """Merge single requests into calls of `sample(messages, sampling, seed, n, tools)`.

    vLLM gives sample i of a request the seed `seed + i`. So requests with consecutive seeds get the same answers from
    one merged request, while the prompt and its images are processed once.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._prompts: dict[tuple[str, Sampling], _Prompt] = {}  # by messages and tools, and sampling
        self._tasks: set[asyncio.Task[None]] = set()

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, tools: Schemas = ()
    ) -> Completion:
        """Sample one completion, in a merged request. Raise the failure that `sample` raises or returns for it."""
        loop = asyncio.get_running_loop()
        key = (json.dumps([list(messages), list(tools)]), sampling)
        if key not in self._prompts:
            # Copy the messages: an episode appends to its conversation as soon as it has an answer.
            self._prompts[key] = _Prompt(json.loads(key[0])[0], sampling, tools)
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
            results = await self._sample(prompt.messages, prompt.sampling, run[0][0], len(run), prompt.tools)
        except asyncio.CancelledError:
            for _, future in run:
                future.cancel()
            raise
        except Exception as error:
            # Every caller of the merged request gets the error, whatever it is.
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


CheckAnswer = Callable[[Replica, str, str], Awaitable[None]]
"""A function that raises TransientError if an answer was computed with wrong weights, such as
`ServedWeights.check_answer`. Its arguments are the replica, its `weights_id` when the request was sent, and the id of
weights in the answer's header."""


class PoolRequests:
    """A `Generator` that sends requests to a pool's servers. Call `open` first and `aclose` last, all from one event
    loop.

    Args:
        limits: limits of valid answers; its `forbidden` tokens are never sampled.
        timeout: seconds for one request.
        check_answer: raises TransientError if an answer was computed with other weights than the server should have.
        failed: called after each failed attempt with the replica and the error, unless the replica has got new weights
            meanwhile.
        tool_format: returns the format of the model's tool calls.
    """

    def __init__(
        self,
        router: Router,
        limits: AnswerLimits,
        timeout: float,
        check_answer: CheckAnswer,
        failed: Callable[[Replica, TransientError], None],
        tool_format: Callable[[], ToolFormat],
    ) -> None:
        self._router, self._limits, self._timeout = router, limits, timeout
        self._check_answer, self._failed = check_answer, failed
        self._merger = RequestMerger(self.sample)
        self._read_format = tool_format

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of the model's tool calls."""
        return self._read_format()

    def open(self) -> None:
        """Open the HTTP session, inside the event loop that will use it."""
        self._session = open_session()

    async def aclose(self) -> None:
        """Close the HTTP session."""
        await self._session.close()

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, tools: Schemas = ()
    ) -> Completion:
        """Sample one completion; see `ServerPool.complete`."""
        return await self._merger.complete(messages, sampling, seed, tools)

    async def sample(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, n: int, tools: Schemas = ()
    ) -> list[Completion | GenerationFailure]:
        """Return `n` samples of one prompt; see `ServerPool.sample`."""
        body = request_body(messages, sampling, seed, n, sorted(self._limits.forbidden), tools)
        statistics = self._router.statistics
        async with self._router.admitted():
            began = time.monotonic()
            try:
                refuse_placeholders(messages, self._limits.placeholders)
                read = await self._router.answered(lambda replica: self._attempt(replica, body, n, sampling.max_tokens))
                results = read()
            except GenerationFailure as failure:
                statistics.failed(failure.reason, n)
                raise
            statistics.answered(results, time.monotonic() - began)
            return results

    async def _attempt(
        self, replica: Replica, body: dict[str, object], n: int, max_tokens: int
    ) -> Callable[[], list[Completion | GenerationFailure]]:
        """Send the request `body` to a server once. Return a function that validates the answer and returns the `n`
        samples.

        The caller runs this function after it has released the server, because validation takes CPU time.
        """
        began, version, weights_id = time.monotonic(), replica.version, replica.weights_id
        try:
            limit = self._limits.answer_bytes(n, max_tokens)
            named = body | {"model": replica.model}
            answer = await ask(self._session, replica.endpoint, named, self._timeout, limit)
            await self._check_answer(replica, weights_id, answer.weights)
            self._router.statistics.continued += n * (answer.weights != weights_id)
        except TransientError as error:
            if replica.version == version:
                self._failed(replica, error)
            raise
        return partial(
            read_completions,
            answer.document,
            self._limits,
            n=n,
            max_tokens=max_tokens,
            version=version,
            server=replica.name,
            seconds=time.monotonic() - began,
        )
