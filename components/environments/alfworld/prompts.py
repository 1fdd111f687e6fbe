"""Prompts of ALFWorld episodes and parsing of the policy's answers, for the text game and AI2-THOR."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, model_validator
from pydantic_core import PydanticCustomError

from armature.components.contracts.settings import Settings

ANSWER_LIMIT = 20_000
"""Number of characters at the beginning of an answer that are read."""

ACTION_LIMIT = 200
"""Largest number of characters in an action; the longest command of a game has about 60."""

TASK = "Your task is to: "
"""Text before the goal sentence in a game's first observation."""
NOTHING = "Nothing happens."
"""Observation of a game after an action that is not possible."""

UNMARKED = 30
"""Number of characters at the end of an answer that count as the action if the answer marks no action."""

_FIRST = frozenset({"observation", "room", "task", "actions"})
_LATER = _FIRST - {"room"} | {"steps", "recalled", "history", "step"}
_PAST = frozenset({"step", "observation", "action"})
_PLACE = re.compile(r"\{(\w+)\}")
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
_FOREIGN = re.compile(r"[^a-z0-9 /]")


class PromptSettings(Settings):
    """Templates of a turn's prompt. Each turn has a prompt of its own that recalls `history_length` past steps.

    {actions} in a template is replaced by the list of admissible actions.

    Example:
        >>> prompt = PromptSettings(answer="<action>{action}</action>", thinking=False)
        >>> prompt.demonstration("go to desk 1")
        '<action>go to desk 1</action>'
    """

    first: str = Field(
        """\
You are an agent in a household simulation. What you see and read now:
{observation}
You can do one of these actions now:
[{actions}]

First think about the next step, inside <think> </think>. Then give exactly one of the actions, inside <action> \
</action>.""",
        min_length=1,
    )
    """Template of the first turn. {observation} is the game's whole text, {room} its description of the room, {task}
    the goal, {actions} the admissible actions."""
    later: str = Field(
        """\
You are an agent in a household simulation. Your task is: {task}
You have taken {steps} actions. The last {recalled}, with what you read before each: {history}
This is step {step}. What you see and read now: {observation}
You can do one of these actions now:
[{actions}]

First think about the next step, inside <think> </think>. Then give exactly one of the actions, inside <action> \
</action>.""",
        min_length=1,
    )
    """Template of later turns: {observation}, {task} and {actions}; {step} is this turn's number, {steps} the number of
    actions taken, {history} the last of them and {recalled} their number. With history_length = 0 every turn uses the
    template first."""
    past: str = Field("[Observation {step}: '{observation}', Action {step}: '{action}']", min_length=1)
    """Template of one step of {history}: its number {step}, its {observation} and the {action} taken in it."""
    past_separator: str = "\n"
    """Text between two steps of {history}."""
    action: str = Field("'{action}'", min_length=1)
    """Template of one of {actions}: {action} is its command."""
    action_separator: str = "\n "
    """Text between two of {actions}."""
    history_length: NonNegativeInt = 2
    """Number of past steps that a prompt recalls."""
    invalid_actions: Literal["shown", "left_out"] = "shown"
    """Treatment of an impossible action in later prompts: shown as a step in which nothing happened, or left_out, so
    that the same prompt is shown again."""
    thinking: bool = True
    """True counts an answer without <think>...</think> as an answer in the wrong format."""
    answer: str = Field(
        "<think>The next step towards the goal is to {action}.</think><action>{action}</action>", min_length=1
    )
    """Template of a demonstration's answer; {action} is its command."""

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        templates = {"first": _FIRST, "later": _LATER, "past": _PAST, "action": {"action"}, "answer": {"action"}}
        for name, places in templates.items():
            if unknown := sorted(set(_PLACE.findall(getattr(self, name))) - places):
                raise PydanticCustomError(
                    "unknown_place",
                    f"{name} has the unknown place {{{unknown[0]}}}; known: {', '.join(sorted(places))}",
                )
            known = "|".join(places)
            if mistyped := re.search(rf"\{{(?:\s+(?:{known})\b|(?:{known})\b(?!}}))", getattr(self, name)):
                raise PydanticCustomError(
                    "mistyped_place", f"{name} has {mistyped[0]!r}: write {{NAME}}, without spaces"
                )
        needed = {"first": ("{task}", "{observation}"), **({"later": ("{task}",)} if self.history_length else {})}
        for name, ways in needed.items():
            if not any(way in getattr(self, name) for way in ways):
                raise PydanticCustomError("task_place_missing", f"{name} has no place {{task}}, which the policy needs")
        for name in ("action", "answer"):
            if "{action}" not in getattr(self, name):
                raise PydanticCustomError("action_place_missing", f"{name} has no place {{action}}")
        if parse_action(self.demonstration("look"), self.thinking) != ParsedAction("look", None):
            raise PydanticCustomError(
                "answer_template_unreadable",
                "the action cannot be read from answer: mark it with <action> (and <think> if thinking)",
            )
        return self

    def demonstration(self, command: str) -> str:
        """Return an answer whose action is `command`."""
        return fill(self.answer, action=command)


def fill(template: str, **values: object) -> str:
    """Return `template` with each {name} replaced once; places in the values themselves are not replaced."""
    return _PLACE.sub(lambda match: str(values[match[1]]), template)


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """The action that an answer contains, in the characters of commands. `defect` is "format" if a rule is broken."""

    action: str
    defect: str | None


def parse_action(answer: str, thinking: bool) -> ParsedAction:
    """Return the action between the first <action> and the next </action> of an answer, in lower case.

    As in verl-agent, an answer that breaks a rule still acts: with the marked text, or else with its last 30
    characters. The rules: both tags are there, with `thinking` also <think> and </think>, and there are no Chinese
    characters. We add that the action is not empty and not longer than any command. Characters that no command has
    become "?", so that they reach neither the next prompt nor the engine.

    Example:
        >>> parse_action("<think>to the desk</think><action>Go to desk 1</action>", thinking=True)
        ParsedAction(action='go to desk 1', defect=None)
        >>> parse_action("go to desk 1", thinking=True)
        ParsedAction(action='go to desk 1', defect='format')
    """
    text = answer[:ANSWER_LIMIT]
    _, opened, rest = text.lower().partition("<action>")
    marked, closed, _ = rest.partition("</action>")
    is_marked = bool(opened and closed)
    action = _FOREIGN.sub("?", " ".join((marked if is_marked else answer[-UNMARKED:].lower()).split()))
    wrong = (
        not is_marked
        or not action
        or len(action) > ACTION_LIMIT
        or (thinking and not ("<think>" in text and "</think>" in text))
        or _CHINESE.search(text) is not None
    )
    return ParsedAction(action[:ACTION_LIMIT], "format" if wrong else None)


def task_of(introduction: str) -> str:
    """Return the goal sentence at the end of a game's first observation, without its full stop.

    Raises:
        ValueError: the observation has no goal sentence.
    """
    _, separator, task = introduction.rpartition(TASK)
    if not separator:
        raise ValueError(f"the first observation names no task: {introduction[-200:]!r}")
    return task.strip().removesuffix(".")


@dataclass
class EpisodePrompts:
    """The prompts of one episode, from the game's current observation and the steps so far."""

    settings: PromptSettings
    observation: str
    _past: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.task = task_of(self.observation)

    def record_action(self, action: str, observation: str) -> None:
        """Record that `action` was taken and that the game answered with `observation`."""
        if observation == NOTHING and self.settings.invalid_actions == "left_out":
            return
        self._past.append((self.observation, action))
        self.observation = observation

    def text(self, actions: Sequence[str]) -> str:
        """Return the prompt of the current turn with the admissible `actions`."""
        settings, steps, observation = self.settings, len(self._past), self.observation
        shown = settings.action_separator.join(
            fill(settings.action, action=action) for action in actions if action != "help"
        )
        if steps == 0 or settings.history_length == 0:
            room = observation.rpartition(TASK)[0].partition("=-")[2].strip() or observation
            return fill(settings.first, observation=observation, room=room, task=self.task, actions=shown)
        recalled = list(enumerate(self._past, 1))[-settings.history_length :]
        history = settings.past_separator.join(
            fill(settings.past, step=step, observation=seen, action=action) for step, (seen, action) in recalled
        )
        return fill(
            settings.later,
            observation=observation,
            task=self.task,
            actions=shown,
            steps=steps,
            recalled=len(recalled),
            history=history,
            step=steps + 1,
        )
