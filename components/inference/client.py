"""The one way we ask a server: exact token ids and the log-probs that they were sampled with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from components.contracts.errors import ServerError
from components.contracts.rollouts import LogProbs, TokenIds
from components.inference.endpoint import Endpoint
from components.inference.settings import EvaluationSamplingSettings, SamplingSettings

MODEL_NAME = "policy"
Sampling = SamplingSettings | EvaluationSamplingSettings
Message = Mapping[str, Any]

# vLLM clamps smaller values to it; e^-100 of the mass is none in float32.
_FORBIDDEN_BIAS = -100.0


class GenerationFailure(ServerError):
    """One request could not be answered; others are not concerned. `reason` is a slug that can be counted."""

    def __init__(self, what: str, *, reason: str, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.what, self.reason, self.where, self.remedy))


def _rebuild(what: str, reason: str, where: str, remedy: str) -> GenerationFailure:
    return GenerationFailure(what, reason=reason, where=where, remedy=remedy)


class Transient(Exception):
    """This attempt failed but another may not: the server died, hung, or is overloaded. `reason` as above."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, eq=False)
class Completion:
    """What one sample of one request gave.

    `prompt_token_ids` (P,) int32: the prompt as the server expanded it, image placeholders included.
    `token_ids` (C,) int32, `logprobs` (C,) float32: what was sampled, the stop token included, and its log-prob
    under the distribution that was sampled from: temperature applied, forbidden tokens taken out.
    `policy_version`: of the weights that the server had during the whole request.
    """

    prompt_token_ids: TokenIds
    token_ids: TokenIds
    logprobs: LogProbs
    text: str
    finish_reason: str
    policy_version: int
    server: str
    seconds: float


def request_body(
    messages: Sequence[Message], sampling: Sampling, seed: int, n: int, forbidden_token_ids: Sequence[int]
) -> dict[str, Any]:
    """The chat request whose answer can be trained on exactly.

    Raises:
        GenerationFailure: an image is not inline; a server is never told to fetch one.
    """
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
            url = part.get("image_url", {}).get("url", "") if isinstance(part, Mapping) else ""
            if part.get("type") == "image_url" and not url.startswith("data:image/"):
                raise GenerationFailure(
                    f"an image is given by address, not by content: {url[:80]!r}",
                    reason="image_not_inline",
                    remedy="send its bytes as data:image/...;base64,...",
                )
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": list(messages),
        "temperature": sampling.temperature,
        "max_completion_tokens": sampling.max_tokens,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "n": n,
        "logprobs": True,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    if forbidden_token_ids:
        body["logit_bias"] = {str(token): _FORBIDDEN_BIAS for token in forbidden_token_ids}
    return body


def open_session() -> aiohttp.ClientSession:
    """For `ask`. It has no limit of its own: callers bound what is under way. Proxies of the surroundings are not used.

    aiohttp and not httpx, which looks at each of its connections for each request: with 128 of them that took more
    time than all else that we do for a turn (`make bench NAMES=pool`).
    """
    # Less than the 5 s after which a server of vLLM's closes what is idle.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(connector=connector, trust_env=False, cookie_jar=aiohttp.DummyCookieJar())


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, body: Mapping[str, Any], timeout: float
) -> dict[str, Any]:
    """Send one chat request; the parsed answer.

    Raises:
        Transient: no answer within `timeout` seconds, a broken connection, or a fault of the server.
        GenerationFailure: the server refuses this request.
        ServerError: the server refuses us: wrong key, or not one of ours.
    """
    url = endpoint.url
    limit = aiohttp.ClientTimeout(total=timeout)
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, headers=endpoint.headers, timeout=limit, allow_redirects=False
        ) as response:
            status, content = response.status, await response.read()
    except TimeoutError as error:
        raise Transient("generation_timeout", f"no answer from {url} in {timeout:g} s") from error
    except aiohttp.ClientError as error:
        raise Transient("connection_lost", f"{url}: {type(error).__name__} {error}") from error
    if status == 200:
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise Transient("broken_answer", f"{url}: not JSON") from error
        if not isinstance(answer, dict):
            raise Transient("broken_answer", f"{url}: not an object")
        return answer
    text = _error_text(content)
    if status in (401, 403, 404):
        raise ServerError(
            f"the server answers {status}: {text}",
            where=url,
            remedy="give its key in VLLM_API_KEY, and serve the model with --served-model-name policy",
        )
    if status in (408, 425, 429) or status >= 500:
        raise Transient("server_error", f"{url}: {status} {text}")
    too_long = "maximum context length" in text or "longer than the maximum model length" in text
    raise GenerationFailure(
        f"the server refuses the request: {status} {text}",
        reason="prompt_too_long" if too_long else "request_refused",
        where=url,
        remedy="raise max_model_len or send less" if too_long else "",
    )


def read_completions(
    answer: Mapping[str, Any], n: int, forbidden: frozenset[int], version: int, server: str, seconds: float
) -> list[Completion | GenerationFailure]:
    """The n samples of an answer in order; a failure stands where one cannot be trusted.

    Raises:
        GenerationFailure: the answer as a whole is not what was asked for.
    """
    try:
        prompt = np.asarray(answer["prompt_token_ids"], dtype=np.int32)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise GenerationFailure(
            f"prompt_token_ids or choices are missing or malformed: {error!r}",
            reason="malformed_answer",
            where=server,
            remedy="the server must be vLLM >= 0.26",
        ) from error
    if len(choices) != n or prompt.ndim != 1 or prompt.size == 0:
        raise GenerationFailure(
            f"{len(choices)} choices instead of {n}, prompt ids of shape {prompt.shape}",
            reason="malformed_answer",
            where=server,
        )
    return [_read_choice(choice, prompt, forbidden, version, server, seconds) for choice in choices]


def _read_choice(
    choice: Mapping[str, Any],
    prompt: TokenIds,
    forbidden: frozenset[int],
    version: int,
    server: str,
    seconds: float,
) -> Completion | GenerationFailure:
    def failure(reason: str, what: str) -> GenerationFailure:
        return GenerationFailure(what, reason=reason, where=f"{server}, choice {choice.get('index')}")

    try:
        tokens = np.asarray(choice["token_ids"], dtype=np.int32)
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        text = choice["message"]["content"] or ""
        finish_reason = str(choice["finish_reason"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return failure("missing_logprobs", f"token_ids, logprobs or message are missing or malformed: {error!r}")
    if len(values) != tokens.size:
        return failure("length_mismatch", f"{tokens.size} token ids but {len(values)} log-probs")
    if tokens.size == 0:
        return failure("empty_completion", "no token was sampled")
    # -9999 is how vLLM writes minus infinity.
    bad = [value for value in values if value is None or not math.isfinite(value) or not -9000 < value <= 1e-4]
    if bad:
        return failure("bad_logprobs", f"log-probs that are none: {bad[:3]}")
    if sampled := forbidden.intersection(tokens.tolist()):
        return failure("placeholder_sampled", f"placeholder tokens {sorted(sampled)} were sampled")
    logprobs = np.minimum(np.asarray(values, dtype=np.float32), 0.0)
    return Completion(prompt, tokens, logprobs, text, finish_reason, version, server, seconds)


def _error_text(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:300]
