"""Chat requests to a server that return the exact sampled token ids with the log-probs they were sampled with."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from armature.components.contracts.errors import ServerError, blanked
from armature.components.contracts.rollouts import Experts, LogProbs, TokenIds
from armature.components.inference.replies import PLAIN, WEIGHTS, BadReply, Endpoint, Reply, ReplyReader
from armature.components.inference.settings import EvaluationSamplingSettings, SamplingSettings
from armature.components.machine.network import socket_options

MODEL_NAME = "policy"
Sampling = SamplingSettings | EvaluationSamplingSettings
Message = Mapping[str, Any]

# Logit bias of a forbidden token. vLLM clamps smaller values to -100, and a probability times e^-100 is 0 in float32.
_FORBIDDEN_BIAS = -100.0


OTHER_WEIGHTS = "other_weights"
"""Failure reason of an attempt: the server computed the answer, or may have computed it, with weights that the pool did
not load."""


class GenerationFailure(ServerError):
    """One request failed for good; other requests are not affected. `reason` is a short slug. It is the code of the
    error, and failures are counted by it."""

    def __init__(self, what: str, *, reason: str, where: str = "", remedy: str = "") -> None:
        super().__init__(what, code=reason, where=where, remedy=remedy)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.what, self.reason, self.where, self.remedy))


def _rebuild(what: str, reason: str, where: str, remedy: str) -> GenerationFailure:
    return GenerationFailure(what, reason=reason, where=where, remedy=remedy)


class ReservedToken(GenerationFailure):
    """A text of the prompt contains `token`, an image placeholder. The server would expect another image there."""

    def __init__(self, token: str) -> None:
        super().__init__(f"a text of the prompt contains {token!r}, an image placeholder", reason="reserved_token")
        self.token = token

    def __reduce__(self) -> tuple[object, ...]:
        return (ReservedToken, (self.token,))


def refuse_placeholders(messages: Sequence[Message], placeholders: Sequence[str]) -> None:
    """Check that no text of `messages` contains a placeholder token.

    Raises:
        ReservedToken: a text contains one of the `placeholders`.

    Example:
        >>> refuse_placeholders([{"role": "user", "content": "a cat"}], ["<image>"])
        >>> refuse_placeholders([{"role": "user", "content": "<image>!"}], ["<image>"])
        Traceback (most recent call last):
        ...
        armature.components.inference.client.ReservedToken: ...
    """
    for message in messages:
        content = message.get("content")
        for part in [content] if isinstance(content, str) else content or ():
            text = part.get("text", "") if isinstance(part, Mapping) else part
            for token in placeholders:
                if token in text:
                    raise ReservedToken(token)


class TransientError(Exception):
    """This attempt failed, but another may succeed: the server died, hung or is overloaded. `reason` is a short slug,
    and failures are counted by it."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled completion of a request.

    Attributes:
        prompt_token_ids: (P,) int32, the prompt as the server expanded it, including image placeholders.
        token_ids: (C,) int32, the sampled tokens including the stop token.
        logprobs: (C,) float32, log-probs of `token_ids` under the distribution that the server sampled from. Its logits
            are divided by the temperature, and forbidden tokens have probability 0.
        policy_version: version of the weights that the server had when the request was sent. All tokens are of this
            version, unless weights change in flight.
        experts: (P + C - 1, layers, k), the experts of each token but the last, if servers return them.
    """

    prompt_token_ids: TokenIds
    token_ids: TokenIds
    logprobs: LogProbs
    text: str
    finish_reason: str
    policy_version: int
    server: str
    seconds: float
    experts: Experts | None = None


def request_body(
    messages: Sequence[Message],
    sampling: Sampling,
    seed: int,
    n: int,
    forbidden_token_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the JSON body of a chat request for `n` samples. The answer contains token ids and log-probs for training.

    `tools` are schemas that the chat template renders. The server does not parse calls: it returns the sampled text.

    Raises:
        GenerationFailure: an image or video is given by URL instead of inline. Servers must not download anything.
    """
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
            kind = part.get("type") if isinstance(part, Mapping) else ""
            url = part.get(kind, {}).get("url", "") if kind in ("image_url", "video_url") else "data:image/"
            if not url.startswith("data:image/"):
                raise GenerationFailure(
                    f"an image is passed by URL, not inline: {url[:80]!r}",
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
    if tools:
        body |= {"tools": list(tools), "tool_choice": "none"}
    if forbidden_token_ids:
        body["logit_bias"] = {str(token): _FORBIDDEN_BIAS for token in forbidden_token_ids}
    return body


def open_session() -> aiohttp.ClientSession:
    """Return an HTTP session for `ask`. It does not limit connections, and ignores proxies set in the environment.

    Callers limit the requests in flight. The session comes from aiohttp because httpx visits all its connections for
    each request: with 128 connections this took more time than everything else we do in a turn (`make bench
    NAMES=pool`).
    """
    # Close idle connections before a vLLM server does after 5 s: it could close one as we send a request on it.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0, socket_factory=_watched_socket)
    jar = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, trust_env=False, cookie_jar=jar, auto_decompress=False)


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    for option in socket_options():
        made.setsockopt(*option)
    return made


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, body: Mapping[str, Any], timeout: float, limit: int
) -> Reply:
    """Send one chat request and return the JSON answer of at most `limit` bytes.

    Raises:
        TransientError: no answer within `timeout` seconds, a broken connection, or a fault of the server.
        GenerationFailure: the server rejects this request.
        ServerError: the server rejects every request: the key is wrong, or it is not a vLLM server for training.
    """
    url, headers = endpoint.url, {**endpoint.headers, **PLAIN}
    whole = aiohttp.ClientTimeout(total=timeout)
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, headers=headers, timeout=whole, allow_redirects=False
        ) as response:
            collector = ReplyReader(url, response.headers, limit)
            async for part in response.content.iter_any():
                collector.add(part)
        reply = Reply(url, response.status, collector.content(), response.headers.get(WEIGHTS, ""))
        if reply.status == 200:
            _ = reply.document  # parse it here: an answer that is not JSON is worth another attempt
            return reply
    except TimeoutError as error:
        raise TransientError("generation_timeout", f"no answer from {url} in {timeout:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TransientError("connection_lost", f"{url}: {type(error).__name__} {error}") from error
    except BadReply as error:
        raise TransientError("broken_answer", f"{url}: {error.what}") from error
    status, text = reply.status, _error_text(reply)
    if status == 404 and body["model"] != MODEL_NAME:
        raise TransientError(OTHER_WEIGHTS, f"{url}: it does not have {body['model']} any more: {text}")
    if status in (401, 403, 404):
        raise ServerError(
            f"the server answers {status}: {text}",
            code="server_key_refused",
            where=url,
            remedy="set VLLM_API_KEY to the server's key, and start the server with `armature serve`",
        )
    if status == 423:
        raise TransientError(OTHER_WEIGHTS, f"{url}: another run holds its lease: {text}")
    if status in (408, 425, 429) or status >= 500:
        raise TransientError("server_error", f"{url}: {status} {text}")
    reason, remedy = "request_refused", ""
    if "maximum context length" in text or "longer than the maximum model length" in text:
        reason, remedy = "prompt_too_long", "raise inference.max_model_len, or shorten the prompt"
    elif "may be provided in one prompt" in text:
        reason, remedy = "too_many_images", "raise inference.max_images_per_prompt or max_videos_per_prompt"
    raise GenerationFailure(f"the server rejects the request: {status} {text}", reason=reason, where=url, remedy=remedy)


def _error_text(reply: Reply) -> str:
    try:
        return blanked(str(reply.document["error"]["message"]))[:300]
    except (BadReply, KeyError, TypeError):
        return reply.text
