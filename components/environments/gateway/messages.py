"""Requests for chat completions in OpenAI's format: their messages, and the responses to them."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from armature.components.artifacts.videos import read_video
from armature.components.contracts.episodes import ChatAnswer, ChatRequest, EarlierMessage, MessageRole
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import EncodedImage

MODEL = "policy"
IGNORED = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "seed", "frequency_penalty"}
    | {"presence_penalty", "user", "store", "metadata", "parallel_tool_calls", "stream", "stream_options"}
)
"""Fields of a request without effect: the recipe sets how tokens are sampled."""
NEUTRAL: dict[str, tuple[Any, ...]] = {"n": (1,), "logprobs": (False,)}
"""Fields of a request that may only have these values, or null."""
_ROLES: dict[str, MessageRole] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"
}  # fmt: skip


RefusalCode = Literal[
    "wrong_key", "too_large", "malformed_request", "unknown_model", "unsupported", "bad_message", "foreign_tool_calls",
    "no_completions_left", "not_answered",
]  # fmt: skip


class Refused(ValueError):
    """A request that is not answered. Requests are counted by `code`."""

    def __init__(self, code: RefusalCode, what: str, status: int = 400) -> None:
        super().__init__(what)
        self.code, self.status = code, status


class SampledCalls:
    """The calls that one gateway has sent, by id, with the text in which the policy wrote them.

    A client sends calls back as JSON. The prompt has to contain them as they were sampled.
    """

    def __init__(self) -> None:
        self._texts: dict[str, tuple[str, ...]] = {}
        self._names: dict[str, str] = {}
        self._written: dict[tuple[str, ...], str] = {}

    def sent(self, answer: ChatAnswer) -> list[dict[str, Any]]:
        """Return the calls of an answer in OpenAI's format, and remember them."""
        ids = tuple(f"call_{uuid4().hex[:24]}" for _ in answer.calls)
        self._written[ids] = answer.text[answer.at :]
        self._names |= {id: call.name for id, call in zip(ids, answer.calls, strict=True)}
        return [
            {
                "id": id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for id, call in zip(ids, answer.calls, strict=True)
        ]

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of the calls of one answer.

        Raises:
            Refused: they are not the calls of an answer of this gateway.
        """
        text = self._written.get(tuple(str(call["id"]) for call in calls))
        if text is None:
            raise Refused("foreign_tool_calls", "an assistant message must have exactly the tool_calls of one answer")
        return text

    def name(self, id: str) -> str:
        """Return the name of the tool of a call.

        Raises:
            Refused: this gateway has sent no such call.
        """
        if id not in self._names:
            raise Refused("foreign_tool_calls", f"tool_call_id {id!r:.80} is not the id of a call")
        return self._names[id]


def read_request(body: Any, sampled: SampledCalls) -> ChatRequest:
    """Return the request that the JSON of a client means.

    Raises:
        Refused: it is malformed, or asks for what this endpoint does not do.
    """
    if not isinstance(body, dict):
        raise Refused("malformed_request", "the body is not a JSON object")
    fields = {name: value for name, value in body.items() if value is not None and value not in ([], {})}
    messages, tools, model = fields.pop("messages", None), fields.pop("tools", []), fields.pop("model", MODEL)
    if model != MODEL:
        raise Refused("unknown_model", f"the model {model!r:.80} does not exist, only {MODEL!r}", 404)
    if fields.pop("tool_choice", "auto") == "none":
        tools = []
    for name, value in fields.items():
        if name not in IGNORED and value not in NEUTRAL.get(name, ()):
            raise Refused("unsupported", f"{name} = {value!r:.80} is not supported; leave it out")
    if not isinstance(messages, list) or not messages:
        raise Refused("malformed_request", "messages are missing")
    try:
        read = [_message(message, sampled) for message in messages]
        offered = tuple(_tool(tool) for tool in tools)
    except Refused:
        raise
    except (DataError, ValueError) as error:
        raise Refused("bad_message", str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused("malformed_request", f"a message or tool is malformed: {type(error).__name__} {error}") from error
    if any(message.role == "system" for message in read[1:]):
        raise Refused("bad_message", "a system message is not the first message")
    if read[-1].role not in ("user", "tool"):
        raise Refused("bad_message", f"the last message has the role {read[-1].role}, not user or tool")
    return ChatRequest(tuple(read), offered)


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool["function"]
    if tool["type"] != "function" or not isinstance(function["name"], str):
        raise Refused("malformed_request", "a tool is not a function with a name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    described = {"name": function["name"], "description": str(function.get("description") or "")}
    return {"type": "function", "function": {**described, "parameters": dict(parameters)}}


def _message(message: Mapping[str, Any], sampled: SampledCalls) -> EarlierMessage:
    if message["role"] not in _ROLES:
        raise Refused("malformed_request", f"a message has the role {message['role']!r:.80}")
    role = _ROLES[message["role"]]
    parts = content(message)
    if role in ("system", "assistant"):
        if not all(isinstance(part, str) for part in parts):
            raise Refused("bad_message", f"a message of the role {role} holds an image")
        if calls := message.get("tool_calls"):
            parts = (*parts, sampled.written(calls))
    return EarlierMessage(role, parts, sampled.name(str(message["tool_call_id"])) if role == "tool" else "")


def content(message: Mapping[str, Any]) -> tuple[str | EncodedImage, ...]:
    """Return the text, images and videos of a message in order.

    Raises:
        ValueError: an image or video is damaged or not inline (nothing is downloaded), or a part is of another type.
    """
    if message.get("content") is None or isinstance(message["content"], str):
        return (message.get("content") or "",)
    return tuple(_part(part) for part in message["content"])


def _part(part: Mapping[str, Any]) -> str | EncodedImage:
    if part["type"] == "text":
        return str(part["text"])
    if part["type"] not in ("image_url", "video_url"):
        raise ValueError(f"a message holds {part['type']!r}; only text, images and videos are supported")
    url = str(part[part["type"]]["url"])
    try:
        return EncodedImage.from_url(url) if part["type"] == "image_url" else read_video(_inline(url))
    except DataError as error:
        raise ValueError(str(error)) from error


def _inline(url: str) -> bytes:
    """Return the bytes of a video in a data URL; other URLs raise a ValueError."""
    head, _, data = url.partition(";base64,")
    if not head.startswith("data:video/"):
        raise ValueError(f"a video is passed by URL, {url[:80]!r}: give its bytes as data:video/...;base64,...")
    return b64decode(data, validate=True)


# --- Responses ---


def response(answer: ChatAnswer, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response to a request, without streaming."""
    message = {"role": "assistant", "content": answer.content if answer.content or not calls else None}
    return _completion("chat.completion", answer, {"message": message | ({"tool_calls": calls} if calls else {})}, True)


def chunks(answer: ChatAnswer, calls: list[dict[str, Any]], usage: bool) -> list[dict[str, Any]]:
    """Return the parts of a streamed response. The last of them has the numbers of tokens if `usage` is True."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": answer.content}]
    deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(calls)]
    made = [_completion("chat.completion.chunk", answer, {"delta": delta}, False) for delta in deltas]
    made.append(_completion("chat.completion.chunk", answer, {"delta": {}}, True))
    if usage:
        made.append({**_completion("chat.completion.chunk", answer, {}, True), "choices": []})
    else:
        made[-1].pop("usage")
    return made


def _completion(kind: str, answer: ChatAnswer, body: dict[str, Any], last: bool) -> dict[str, Any]:
    finish = "tool_calls" if answer.calls else answer.finish_reason
    made = {"id": "chatcmpl-policy", "object": kind, "created": 0, "model": MODEL}
    choice = {"index": 0, "finish_reason": finish if last else None, "logprobs": None, **body}
    tokens = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    total = {"total_tokens": answer.prompt_tokens + answer.completion_tokens}
    return {**made, "choices": [choice]} | ({"usage": {**tokens, **total}} if last else {})
