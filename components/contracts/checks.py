"""Checks that copy an environment's observations, outcomes and attributes into plain types.

Environments are code that others wrote. Reading their values may run more of that code (a method of a subclass of
`str`, for example), so any check may raise or hang.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any, TypeVar, get_args

import numpy as np

from armature.components.contracts.episodes import (
    ActionDefect,
    ChatRequest,
    EarlierMessage,
    Environment,
    MessageRole,
    Observation,
    Outcome,
)
from armature.components.contracts.errors import ConfigurationError, RolloutFailed, said
from armature.components.contracts.images import EncodedImage

MOST_CHARACTERS = 2**22
"""Limit on the number of characters in one observation: its texts, admissible actions and `anchor_key` together. No
model reads as many."""

MOST_IMAGE_BYTES = 2**28
"""Limit on the number of bytes of all images of one observation together."""

MOST_PARTS, MOST_ACTIONS, MOST_REWARDS, MOST_TURNS = 2**12, 2**16, 2**8, 2**16
"""Limits on the number of content parts and of admissible actions of an observation, of reward parts of an outcome, and
of turns of an episode."""

_DEFECTS: dict[str, ActionDefect] = {name: name for name in get_args(ActionDefect)}
_ROLES: dict[str, MessageRole] = {name: name for name in get_args(MessageRole)}

ItemT = TypeVar("ItemT")


def checked_observation(value: object) -> Observation:
    """Check an observation and return a copy of it in plain types.

    Raises:
        RolloutFailed: `environment_error`, `bad_text` or `bad_image`.
    """
    if not isinstance(value, Observation):
        raise _wrong("an observation", value)
    content = tuple(_part(part) for part in _items("content", value.content, MOST_PARTS))
    earlier = tuple(_message(message) for message in _items("earlier", value.earlier, MOST_PARTS))
    if any(message.role == "tool" for message in earlier):
        raise RolloutFailed("environment_error", "a message of the role tool, which only a request may have")
    request = None if value.request is None else _request(value.request)
    shown = earlier if request is None else request.messages
    parts = (*(part for message in shown for part in message.content), *content)
    actions: tuple[str, ...] | None = None
    if value.admissible_actions is not None:
        listed = _items("admissible_actions", value.admissible_actions, MOST_ACTIONS)
        actions = tuple(plain_text("an admissible action", action) for action in listed)
    anchor = None if value.anchor_key is None else plain_text("anchor_key", value.anchor_key)
    characters = sum(len(text) for text in (*parts, *(actions or ()), anchor or "") if isinstance(text, str))
    if characters > MOST_CHARACTERS:
        raise RolloutFailed("environment_error", f"an observation of {characters} characters")
    size = sum(len(part.data) for part in parts if isinstance(part, EncodedImage))
    if size > MOST_IMAGE_BYTES:
        raise RolloutFailed("bad_image", f"an observation whose images have {size} bytes")
    return Observation(content, actions, anchor, earlier, request)


def checked_outcome(value: object) -> Outcome:
    """Check an outcome and return a copy of it in plain types, without its `info`.

    Raises:
        RolloutFailed: `environment_error`, `bad_text`, `bad_image` or `bad_reward`.
    """
    if not isinstance(value, Outcome):
        raise _wrong("an outcome", value)
    observation = None if value.observation is None else checked_observation(value.observation)
    defect = value.action_defect
    if defect is not None and plain_text("action_defect", defect) not in _DEFECTS:
        raise RolloutFailed("environment_error", f"action_defect is {defect!r:.80}, not one of {', '.join(_DEFECTS)}")
    parts = checked_numbers("reward_parts", value.reward_parts)
    return Outcome(
        observation, parts, None if defect is None else next(d for d in get_args(ActionDefect) if d == defect)
    )


def checked_numbers(what: str, value: object) -> dict[str, float]:
    """Check that `value` maps names to finite numbers, and return it as a dict of floats.

    `what` names the value in errors.

    Raises:
        RolloutFailed: `environment_error` for another type, `bad_reward` for a number that is not finite.
    """
    if not isinstance(value, Mapping):
        raise _wrong(f"a mapping as {what}", value)
    numbers: dict[str, float] = {}
    for name, number in _first(what, value.items(), MOST_REWARDS):
        name = plain_text(f"a name in {what}", name)
        if not isinstance(number, Real | np.bool_):
            raise _wrong(f"a number as {name!r} in {what}", number)
        try:
            numbers[name] = float(number)
        except OverflowError:
            numbers[name] = math.inf
        if not math.isfinite(numbers[name]):
            raise RolloutFailed("bad_reward", f"{name!r} in {what} is {numbers[name]}")
    return numbers


def plain_text(what: str, value: object) -> str:
    """Check a text and return it as a plain `str`; `what` names the value in errors.

    Raises:
        RolloutFailed: `environment_error` if it is not text, `bad_text` if it is not valid Unicode.
    """
    if not isinstance(value, str):
        raise _wrong(f"text as {what}", value)
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RolloutFailed("bad_text", f"{what} holds a lone surrogate at {error.start}") from None
    return text


@dataclass(frozen=True)
class EnvironmentInfo:
    """The checked attributes of an environment."""

    name: str
    system_prompt: str | None
    dialogue: bool
    max_turns: int


def environment_info(environment: Environment) -> EnvironmentInfo:
    """Read and check the attributes that every environment has.

    Raises:
        ConfigurationError: an attribute is missing, or has the wrong type or value.
    """
    try:
        prompt, turns = environment.system_prompt, environment.max_turns
        facts = EnvironmentInfo(
            plain_text("name", environment.name),
            None if prompt is None else plain_text("system_prompt", prompt),
            environment.dialogue,
            turns,
        )
        if not isinstance(facts.dialogue, bool):
            raise _wrong("true or false as dialogue", facts.dialogue)
        if not isinstance(turns, int) or isinstance(turns, bool) or not 1 <= turns <= MOST_TURNS:
            raise RolloutFailed("environment_error", f"max_turns is {turns!r:.80}, not from 1 to {MOST_TURNS}")
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"the environment lacks a required attribute: {said(error)}",
            code="environment_attribute_missing",
            where=f"{type(environment).__module__}.{type(environment).__qualname__}",
            remedy="give it the attributes of `armature.components.contracts.episodes.Environment`",
        ) from error
    return facts


def _message(message: object) -> EarlierMessage:
    """Check a message that comes before an observation, and return a copy of it in plain types."""
    if not isinstance(message, EarlierMessage):
        raise _wrong("an earlier message", message)
    role = plain_text("a role", message.role)
    if role not in _ROLES:
        raise RolloutFailed("environment_error", f"a message of role {role!r:.80}, not one of {', '.join(_ROLES)}")
    content = tuple(_part(part) for part in _items("content", message.content, MOST_PARTS))
    if role not in ("user", "tool") and any(isinstance(part, EncodedImage) for part in content):
        raise RolloutFailed("environment_error", f"an image in a message of role {role!r}; only a user shows images")
    return EarlierMessage(_ROLES[role], content, plain_text("the name of a tool", message.name))


def _request(request: object) -> ChatRequest:
    """Check a request of an agent program, and return a copy of it in plain types."""
    if not isinstance(request, ChatRequest):
        raise _wrong("a chat request", request)
    messages = tuple(_message(message) for message in _items("messages", request.messages, MOST_PARTS))
    tools = json.dumps(_items("tools", request.tools, MOST_PARTS))
    if not messages or len(tools) > MOST_CHARACTERS:
        raise RolloutFailed("environment_error", f"a request of {len(messages)} messages and {len(tools)} of tools")
    return ChatRequest(messages, tuple(json.loads(tools)))


def _part(part: object) -> str | EncodedImage:
    """Check one part of a message's content, a text or an image, and return a copy of it in plain types."""
    if isinstance(part, str):
        return plain_text("a part of an observation", part)
    if not isinstance(part, EncodedImage):
        raise _wrong("text or an image in an observation", part)
    if not isinstance(part.data, bytes | bytearray | memoryview) or not isinstance(part.media_type, str):
        raise RolloutFailed("bad_image", f"an image of {_kind(part.data)} and media type {_kind(part.media_type)}")
    return EncodedImage(bytes(part.data), plain_text("a media type", part.media_type))


def _items(what: str, value: object, most: int) -> list[Any]:
    """Check that `value` is a sequence of at most `most` entries, but not a string, and return it as a list."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _wrong(f"a sequence as {what}", value)
    return _first(what, value, most)


def _first(what: str, values: Iterable[ItemT], most: int) -> list[ItemT]:
    """Return `values` as a list; raise RolloutFailed if there are more than `most` entries.

    It reads at most one entry more than that, because an iterable may be endless.
    """
    items = list(islice(values, most + 1))
    if len(items) > most:
        raise RolloutFailed("environment_error", f"{what} has more than {most} entries")
    return items


def _wrong(expected: str, value: object) -> RolloutFailed:
    """Return the error for a value of the wrong type; `expected` describes the right type."""
    return RolloutFailed("environment_error", f"{expected} was expected, not {_kind(value)}")


def _kind(value: object) -> str:
    """Return the name of the value's class, which messages show in place of the value."""
    return type(value).__name__
