"""From a row to an example: the messages that the policy sees, the correct answer, and digests that identify both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar, get_args

from armature.components.contracts.episodes import Role
from armature.components.contracts.value_text import value_text
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.images import TableImage, table_images
from armature.components.environments.dataset.settings import DatasetEnvironmentSettings
from armature.components.environments.dataset.template import Place, column_name, parse_template, split_at
from armature.components.environments.dataset.values import read_json
from armature.components.rewards.make import reward_columns
from armature.components.rewards.reward import extracted

# --- Conversations in the format of Hugging Face and OpenAI: messages with a role and text or a list of parts ---

ChatPart = str | Place | TableImage
RoleT = TypeVar("RoleT", bound=str)
ROLES: dict[str, Role] = {name: name for name in get_args(Role)}


def chat_messages(value: Any, column: str, image_token: str) -> tuple[list[tuple[Role, list[ChatPart]]], str | None]:
    """Return the messages up to the user's last one, and the assistant's message after it or None.

    Args:
        value: a list of messages, or its JSON text.
        column: the column's name, for errors.
        image_token: text in the user's messages that stands for an image; empty for none.

    Raises:
        BadRow: the messages are not a chat that the model can continue.
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
        raise BadRow("bad_conversation", "the message before the model's turn is not from the user")
    if any(role == "system" for role, _ in messages[1:]):
        raise BadRow("bad_conversation", "a system message is not the first")
    return messages, answer


def _message(message: Any, number: int, image_token: str) -> tuple[Role, list[ChatPart]]:
    role = ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
    if role is None:
        raise BadRow("bad_conversation", f"the role of message {number} is not one of {', '.join(ROLES)}")
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
    made: list[ChatPart] = []
    for part in parts:
        made += content_parts(part, number, image_token if role == "user" else "")
    if role != "user" and not all(isinstance(part, str) for part in made):
        raise BadRow("bad_conversation", f"message {number} has an image and is not from the user")
    return role, made


def content_parts(part: Any, number: int, image_token: str) -> list[ChatPart]:
    """Return one part of the content of message `number`: a text, cut at each `image_token`, or an image or video.

    Raises:
        BadRow: the part has another form.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return list(split_at(image_token, part["text"]))
    if kind in ("image_url", "video_url"):
        url = part.get(kind)
        return list(table_images(url.get("url") if isinstance(url, Mapping) else url, kind))
    if kind in ("image", "video"):
        image = next((part[key] for key in (kind, "url", "path") if part.get(key) is not None), None)
        return [Place.IMAGE] if image is None else list(table_images(image, kind))
    raise BadRow("bad_conversation", f"message {number} has a part that is neither text nor an image")


# --- Examples ---

Part = str | TableImage


@dataclass(frozen=True)
class RowExample:
    """A usable row: its messages, of which the last is the user's, the correct answer as a JSON value, and its kind.

    Rows with equal messages have the same `key`; rows with equal messages, answer and kind have the same `digest`.
    """

    messages: tuple[tuple[Role, tuple[Part, ...]], ...]
    answer: Any
    kind: str
    key: str
    digest: str

    @property
    def images(self) -> Iterator[TableImage]:
        return (part for _, parts in self.messages for part in parts if isinstance(part, TableImage))


def used_columns(settings: DatasetEnvironmentSettings) -> list[tuple[str, ...]]:
    """Return the columns that the settings use. Each item lists alternative names, of which one has to exist."""
    templates = [parse_template(text) for text in (settings.prompt, settings.system, settings.demonstration)]
    split = settings.split
    named = [
        settings.conversation,
        *settings.images,
        settings.answer,
        settings.kind,
        *map(column_name, reward_columns(settings.rewards)),
        *(each.column for each in settings.filters),
        getattr(split, "column", ""),
        getattr(split, "group", ""),
    ]
    placed = [column.names for template in templates for column in template.columns]
    return list(dict.fromkeys([*placed, *((name,) for name in named if name)]))


def scanned_columns(settings: DatasetEnvironmentSettings) -> set[str]:
    """Return the names of all columns that the settings use."""
    return {name for names in used_columns(settings) for name in names}


def example_of(row: Mapping[str, Any], settings: DatasetEnvironmentSettings) -> RowExample:
    """Return a row as an example.

    Raises:
        BadRow: the row cannot be used.
    """
    images = [image for column in settings.images for image in table_images(row.get(column), column)]
    messages, last_message = _messages(row, settings)
    answer = _answer(row, settings) if settings.answer else last_message
    if settings.answer and (answer is None or (isinstance(answer, str) and not answer.strip())):
        raise BadRow("no_answer", f"{settings.answer!r} is null or empty")
    kind = row.get(settings.kind) if settings.kind else ""
    try:
        kind = value_text(kind)
    except ValueError:
        missing = "null" if kind is None else type(kind).__name__
        raise BadRow("no_kind", f"{settings.kind!r} is {missing}") from None
    shown = tuple((role, tuple(parts)) for role, parts in place_images(messages, images))
    if not any(isinstance(part, TableImage) or part.strip() for part in shown[-1][1]):
        raise BadRow("no_text", "the prompt is empty")
    check_text(shown, answer, kind, settings.max_characters)
    content = [[role, [part if isinstance(part, str) else part.reference for part in parts]] for role, parts in shown]
    key = _sha256(content)
    return RowExample(shown, answer, kind, key, _sha256([key, answer, kind]))


def _answer(row: Mapping[str, Any], settings: DatasetEnvironmentSettings) -> Any:
    answer = plain_json(row.get(settings.answer))
    if settings.answer_extract == "all" or answer is None:
        return answer
    if not isinstance(answer, str):
        raise BadRow("wrong_type", f"{settings.answer!r} is {type(answer).__name__}, and answer_extract needs text")
    part = extracted(answer, settings.answer_extract)
    if part is None:
        raise BadRow("no_answer", f"{settings.answer!r} has no {settings.answer_extract}: {answer!r:.100}")
    return part


def demonstration_of(row: Mapping[str, Any], example: RowExample, settings: DatasetEnvironmentSettings) -> str:
    """Return the text that the model should write for a row: the filled template `demonstration`, or the answer.

    The text is empty if the answer is not text or a number.

    Raises:
        BadRow: a column of the template is null or has another type.
    """
    if settings.demonstration:
        return "".join(str(part) for part in parse_template(settings.demonstration).fill(row))
    answer = example.answer[0] if isinstance(example.answer, list) and example.answer else example.answer
    return "" if answer is None or isinstance(answer, list | dict) else value_text(answer)


def plain_json(value: Any) -> Any:
    """Return a value of a table as JSON. Bytes in lists and dicts are left out, and other types become null."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(each) for key, each in value.items() if not isinstance(each, bytes)}
    if isinstance(value, list | tuple):
        return [plain_json(each) for each in value if not isinstance(each, bytes)]
    return None


def row_for_rewards(row: Mapping[str, Any], settings: DatasetEnvironmentSettings) -> dict[str, Any]:
    """Return a row's columns as JSON for the rewards, without images.

    A column that a reward's settings name in another Unicode spelling is there under that spelling as well.
    """
    named = {name: row[column_name(name)] for name in reward_columns(settings.rewards) if column_name(name) in row}
    return {
        name: plain_json(value)
        for name, value in {**row, **named}.items()
        if name not in settings.images and not isinstance(value, bytes)
    }


def _messages(
    row: Mapping[str, Any], settings: DatasetEnvironmentSettings
) -> tuple[list[tuple[Role, list[ChatPart]]], str | None]:
    """Return the messages before the model's turn, and the conversation's message in that turn or None."""
    token = settings.image_token
    if settings.conversation:
        return chat_messages(row.get(settings.conversation), settings.conversation, token)
    asked = parse_template(settings.prompt).fill(row, token)
    messages: list[tuple[Role, list[ChatPart]]] = [("user", list(asked))]
    if settings.system:
        messages.insert(0, ("system", list(parse_template(settings.system).fill(row))))
    return messages, None


def place_images(
    messages: Sequence[tuple[RoleT, list[ChatPart]]], images: Sequence[TableImage]
) -> Iterator[tuple[RoleT, list[Part]]]:
    """Put the row's images into their places in the messages, and join texts that follow one another.

    Without any place, all images go before the text of the user's first message.

    Raises:
        BadRow: there are more or fewer places than images.
    """
    left = list(images)
    if left and not any(isinstance(part, Place) for _, parts in messages for part in parts):
        first = next(number for number, (role, _) in enumerate(messages) if role == "user")
        messages = [
            (role, [Place.IMAGES, *parts] if number == first else parts)
            for number, (role, parts) in enumerate(messages)
        ]
    filled: list[tuple[RoleT, list[Part]]] = []
    for role, parts in messages:
        made: list[Part] = []
        for part in parts:
            if part is Place.IMAGES:
                made += left
                left = []
            elif part is Place.IMAGE:
                if not left:
                    raise BadRow("image_count", f"the prompt has places for more than {len(images)} images")
                made.append(left.pop(0))
            elif isinstance(part, str) and made and isinstance(made[-1], str):
                made[-1] += part
            elif part != "":
                made.append(part)
        filled.append((role, made))
    if left:
        raise BadRow("image_count", f"the prompt has no place for {len(left)} of {len(images)} images")
    yield from filled


def check_text(messages: Sequence[tuple[str, Sequence[Part]]], answer: Any, kind: str, most: int) -> None:
    """Check that the texts of a row are valid Unicode and have at most `most` characters together.

    Raises:
        BadRow: they are not, or have more.
    """
    texts = [part for _, parts in messages for part in parts if isinstance(part, str)]
    try:
        texts += [answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False), kind]
        length = sum(map(len, texts))
        if length > most:
            raise BadRow("too_long", f"{length} characters, more than max_characters = {most}")
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise BadRow("bad_text", f"a lone surrogate at character {error.start}") from None
    except RecursionError:
        raise BadRow("wrong_type", "the answer is too deeply nested") from None


def _sha256(document: Any) -> str:
    return sha256(json.dumps(document, sort_keys=True, ensure_ascii=False).encode(errors="replace")).hexdigest()[:32]
