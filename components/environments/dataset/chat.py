"""Conversations as Hugging Face and OpenAI write them: messages with a role and content, text or a list of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from armature.components.contracts.episodes import Role
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.images import TableImage, table_images
from armature.components.environments.dataset.template import Place, split_at
from armature.components.environments.dataset.values import read_json

ChatPart = str | Place | TableImage
ROLES: dict[str, Role] = {name: name for name in get_args(Role)}


def chat_messages(value: Any, column: str, image_token: str) -> tuple[list[tuple[Role, list[ChatPart]]], str | None]:
    """The messages up to the last of the user, and what the assistant says after it, if it is there.

    Raises:
        BadRow: they are not a chat that the model can continue.
    """
    if isinstance(value, str):
        try:
            value = read_json(value)
        except (ValueError, RecursionError) as error:
            raise BadRow("bad_conversation", f"{column!r} is text and not JSON: {error}") from None
    if not isinstance(value, list | tuple) or not value:
        raise BadRow("bad_conversation", f"{column!r} is not a list of messages")
    messages = [_message(message, number, image_token) for number, message in enumerate(value)]
    answer = None
    if messages[-1][0] == "assistant":
        answer = "".join(map(str, messages.pop()[1]))
        if not answer.strip():
            raise BadRow("no_answer", "the last message is empty")
    if not messages or messages[-1][0] != "user":
        raise BadRow("bad_conversation", "the message before the model's is not the user's")
    if any(role == "system" for role, _ in messages[1:]):
        raise BadRow("bad_conversation", "a system message is not the first")
    return messages, answer


def _message(message: Any, number: int, image_token: str) -> tuple[Role, list[ChatPart]]:
    role = ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
    if role is None:
        raise BadRow("bad_conversation", f"message {number} has no role of {', '.join(ROLES)}")
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
    made: list[ChatPart] = []
    for part in parts:
        made += _part(part, number, image_token if role == "user" else "")
    if role != "user" and not all(isinstance(part, str) for part in made):
        raise BadRow("bad_conversation", f"message {number} has an image and is not the user's")
    return role, made


def _part(part: Any, number: int, image_token: str) -> list[ChatPart]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return list(split_at(image_token, part["text"]))
    if kind == "image_url":
        url = part.get("image_url")
        return list(table_images(url.get("url") if isinstance(url, Mapping) else url, "image_url"))
    if kind == "image":
        given = next((part[key] for key in ("image", "url", "path") if part.get(key) is not None), None)
        return [Place.IMAGE] if given is None else list(table_images(given, "image"))
    raise BadRow("bad_conversation", f"message {number} has a part that is neither text nor an image")
