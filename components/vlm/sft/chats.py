"""A row's conversation in the format of Hugging Face and OpenAI: messages with role, parts and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.images import TableImage, table_images
from armature.components.environments.dataset.rows import check_text, content_parts, place_images
from armature.components.environments.dataset.values import read_json
from armature.components.vlm.sft.settings import ConversationSettings, PairColumns

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Names of a message's fields besides role and content. Templates read them; null counts as absent."""


@dataclass(frozen=True)
class ChatMessage:
    """A message: its texts and images in reading order, and its other fields as the template reads them."""

    role: str
    content: tuple[str | TableImage, ...]
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class ChatRow:
    """A conversation of a row, and the schemas of the tools that it may call.

    Answers before message number `since` are not trained on. It is the first message in which the two conversations of
    a pair differ, and 0 for a conversation of its own.
    """

    messages: tuple[ChatMessage, ...]
    tools: list[Any] | None
    since: int = 0

    @property
    def images(self) -> Iterator[TableImage]:
        """The images and videos, in order."""
        return (part for message in self.messages for part in message.content if isinstance(part, TableImage))

    @property
    def texts(self) -> Iterator[str]:
        """All texts that the template may show."""
        for message in self.messages:
            yield from (part for part in message.content if isinstance(part, str))
            yield from (each if isinstance(each, str) else json.dumps(each) for each in message.fields.values())
        yield json.dumps(self.tools)

    @property
    def key(self) -> str:
        """Digest of all that comes before the last answer, or before both answers of a pair. Rows with equal ones
        belong into the same split."""
        last = self.since or max(at for at, message in enumerate(self.messages) if message.role == "assistant")
        shown = [
            [one.role, dict(one.fields), [each if isinstance(each, str) else each.reference for each in one.content]]
            for one in self.messages[:last]
        ]
        return sha256(json.dumps([shown, self.tools], sort_keys=True).encode(errors="replace")).hexdigest()


def chat_row(row: Mapping[str, Any], settings: ConversationSettings) -> ChatRow:
    """Read the conversation of a row.

    Raises:
        BadRow: it is not one that a model can be trained on.

    Example:
        >>> chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
        >>> [each.role for each in chat_row({"messages": chat}, ConversationSettings(source="chats.jsonl")).messages]
        ['user', 'assistant']
    """
    return _chat(_listed(row, settings.messages), row, settings)


def chat_pair(row: Mapping[str, Any], settings: ConversationSettings, columns: PairColumns) -> tuple[ChatRow, ChatRow]:
    """Read the chosen and the rejected conversation of a row; both begin with the same messages.

    Raises:
        BadRow: they are not a pair that a model can be trained on.

    Example:
        >>> row = {"prompt": [{"role": "user", "content": "2 + 2?"}]}
        >>> row |= {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
        >>> chosen, rejected = chat_pair(row, ConversationSettings(source="pairs.jsonl"), PairColumns())
        >>> rejected.messages[rejected.since].content
        ('rejected',)
    """
    before = row.get(columns.prompt)
    with suppress(ValueError, RecursionError):
        before = read_json(before) if isinstance(before, str) else before
    before = before if isinstance(before, list | tuple) else ()  # a text only repeats how the conversations begin
    both = [_chat([*before, *_listed(row, name)], row, settings) for name in (columns.chosen, columns.rejected)]
    chosen, rejected = (each.messages for each in both)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if chosen == rejected:
        raise BadRow("equal_answers", "both answers are the same")
    if not shared:
        raise BadRow("no_prompt", "the two conversations of the pair begin with different messages")
    if any(len(messages) == shared or messages[shared].role != "assistant" for messages in (chosen, rejected)):
        raise BadRow("no_answer", f"message {shared}, the first that differs, is not from the assistant in both")
    return replace(both[0], since=shared), replace(both[1], since=shared)


def _listed(row: Mapping[str, Any], column: str) -> Sequence[Any]:
    listed = _json(row.get(column), column, "bad_conversation")
    if not isinstance(listed, list | tuple) or not listed:
        raise BadRow("bad_conversation", f"{column!r} is not a list of messages")
    return listed


def _chat(listed: Sequence[Any], row: Mapping[str, Any], settings: ConversationSettings) -> ChatRow:
    """Return a list of messages as a conversation, with the images of the row's columns in their places."""
    read = [_message(message, number, settings.image_token) for number, message in enumerate(listed)]
    images = [image for column in settings.images for image in table_images(row.get(column), column)]
    if images and all(role != "user" for role, _, _ in read):
        raise BadRow("image_count", "no message is from the user, who shows the images")
    placed = place_images([(role, parts) for role, parts, _ in read], images)
    messages = [ChatMessage(role, tuple(parts), read[at][2]) for at, (role, parts) in enumerate(placed)]
    if not any(each.role == "assistant" for each in messages):
        raise BadRow("no_answer", "no message is from the assistant")
    for number, each in enumerate(messages):
        if each.role == "assistant" and not (each.fields or any(str(part).strip() for part in each.content)):
            raise BadRow("no_answer", f"message {number} of the assistant is empty")
        if each.role in ("assistant", "system") and any(isinstance(part, TableImage) for part in each.content):
            raise BadRow("bad_conversation", f"message {number} has an image and is from the {each.role}")
    tools = _json(row.get(settings.tools), settings.tools, "bad_tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise BadRow("bad_tools", f"{settings.tools!r} is not a list of JSON schemas")
    texts = [(each.role, each.content) for each in messages]
    check_text(texts, [dict(each.fields) for each in messages], "", settings.max_characters)
    return ChatRow(tuple(messages), _filled(tools))


def _message(message: Any, number: int, image_token: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the role, the parts of the content and the other fields of a message."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise BadRow("bad_conversation", f"the role of message {number} is not one of {', '.join(ROLES)}")
    allowed = ("role", "content", *FIELDS)
    if unknown := [key for key, value in message.items() if value is not None and key not in allowed]:
        raise BadRow("bad_conversation", f"message {number} has an unknown field {unknown[0]!r:.80}")
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content or ""}]
    made = [piece for part in parts for piece in content_parts(_filled(part), number, image_token)]
    fields = {name: _filled(message[name]) for name in FIELDS if message.get(name) is not None}
    if "tool_calls" in fields:
        fields["tool_calls"] = _calls(_json(fields["tool_calls"], "tool_calls", "bad_tools"), number)
    return message["role"], made, fields


def _calls(calls: Any, number: int) -> list[Any]:
    """Return tool calls with arguments as objects, in place of the JSON text that OpenAI's format has."""
    if not isinstance(calls, list | tuple):
        raise BadRow("bad_tools", f"tool_calls of message {number} is not a list")
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow("bad_tools", f"message {number} has a tool call without the name of its function")
        arguments = _json(function.get("arguments") or {}, "arguments", "bad_tools")
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def _json(value: Any, name: str, reason: str) -> Any:
    """Return a value, or what it says if it is JSON text."""
    try:
        return read_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise BadRow(reason, f"{name!r} is text and not JSON: {error}") from None


def _filled(value: Any) -> Any:
    """Return a value without the nulls with which tables fill the fields that an object does not have."""
    if isinstance(value, Mapping):
        return {key: _filled(each) for key, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, list | tuple) else value
