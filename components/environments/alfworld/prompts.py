"""What the policy is asked, what it is reminded of, and how its answer is read. Shared by text and THOR."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, model_validator
from pydantic_core import PydanticCustomError

from armature.components.contracts.settings import Settings

ANSWER_LIMIT = 20_000
"""Characters of an answer that are looked at."""

ACTION_LIMIT = 200
"""Characters of an action; the longest command of a game has about 60."""

TASK = "Your task is to: "
NOTHING = "Nothing happens."
"""What a game says of an action that is not possible."""

UNREAD = 30
"""Characters at an answer's end that stand for its action where it marks none."""

_FIRST = frozenset({"observation", "room", "task", "actions"})
_LATER = _FIRST - {"room"} | {"steps", "recalled", "history", "step"}
_PAST = frozenset({"step", "observation", "action"})
_PLACE = re.compile(r"\{(\w+)\}")
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
_FOREIGN = re.compile(r"[^a-z0-9 /]")


class PromptSettings(Settings):
    """Templates of a turn's text. Each turn is asked again, with as much of the past as `history_length` allows.

    The list of admissible actions is shown where a template says {actions}.
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
    """The first turn: {observation} is all that the game says, {room} its description of the room, {task} the goal,
    {actions} the admissible actions."""
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
    """Later turns: {observation}, {task}, {actions}; {step} is this turn's number, {steps} how many actions were taken,
    {history} the last of them and {recalled} how many these are. With history_length = 0 it is not used: each turn then
    looks like the first."""
    past: str = Field("[Observation {step}: '{observation}', Action {step}: '{action}']", min_length=1)
    """One step of {history}: {step}, {observation}, {action} taken then."""
    past_separator: str = "\n"
    """What stands between two steps of {history}."""
    action: str = Field("'{action}'", min_length=1)
    """How one of {actions} is written: {action}."""
    action_separator: str = "\n "
    """What stands between two of {actions}."""
    history_length: NonNegativeInt = 2
    """Past steps that a prompt recalls."""
    invalid_actions: Literal["shown", "left_out"] = "shown"
    """What an action that was not possible leaves behind: shown (a step, and that nothing happened) or left_out
    (nothing: the same is asked again)."""
    thinking: bool = True
    """Whether an answer without <think>...</think> counts as unreadable."""
    answer: str = Field(
        "<think>The next step towards the goal is to {action}.</think><action>{action}</action>", min_length=1
    )
    """An answer as a demonstration gives it; {action} is its command."""

    @model_validator(mode="after")
    def _places_are_known(self) -> Self:
        known = {"first": _FIRST, "later": _LATER, "past": _PAST, "action": {"action"}, "answer": {"action"}}
        for name, places in known.items():
            if unknown := sorted(set(_PLACE.findall(getattr(self, name))) - places):
                raise PydanticCustomError(
                    "unknown_place", f"{name} holds {{{unknown[0]}}}; known: {', '.join(sorted(places))}"
                )
        for name in ("action", "answer"):
            if "{action}" not in getattr(self, name):
                raise PydanticCustomError("action_place_missing", f"{name} does not hold {{action}}")
        if parse_action(self.demonstration("look"), self.thinking) != ParsedAction("look", None):
            raise PydanticCustomError(
                "answer_template_unreadable",
                "answer is not read as its action: mark it with <action> (and <think> if thinking)",
            )
        return self

    def demonstration(self, command: str) -> str:
        """The answer whose action is `command`."""
        return fill(self.answer, action=command)


def fill(template: str, **values: object) -> str:
    """`template` with each {name} replaced once: what is put in is not looked at again."""
    return _PLACE.sub(lambda match: str(values[match[1]]), template)


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """The action that an answer stands for, in a command's alphabet; `defect` is "format" if it was not marked."""

    action: str
    defect: str | None


def parse_action(answer: str, thinking: bool) -> ParsedAction:
    """Read the action between the first <action> and the </action> after it, in any case.

    As in verl-agent, an answer that breaks a rule still acts: with what is marked or else with its last 30
    characters. The rules: the tags are there, <think> and </think> as well if `thinking`, no Chinese characters;
    and ours, the action is not empty and not longer than a command can be. Characters that no command has become
    "?", so that neither the next prompt nor the engine meets them.
    """
    looked_at = answer[:ANSWER_LIMIT]
    lowered = looked_at.lower()
    _, opened, rest = lowered.partition("<action>")
    marked, closed, _ = rest.partition("</action>")
    found = bool(opened and closed)
    action = _FOREIGN.sub("?", " ".join((marked if found else answer[-UNREAD:].lower()).split()))
    wrong = (
        not found
        or not action
        or len(action) > ACTION_LIMIT
        or (thinking and not ("<think>" in looked_at and "</think>" in looked_at))
        or _CHINESE.search(looked_at) is not None
    )
    return ParsedAction(action[:ACTION_LIMIT], "format" if wrong else None)


def task_of(introduction: str) -> str:
    """The goal sentence at the end of a game's first observation, without its full stop.

    Raises:
        ValueError: there is none.
    """
    _, found, task = introduction.rpartition(TASK)
    if not found:
        raise ValueError(f"the first observation names no task: {introduction[-200:]!r}")
    return task.strip().removesuffix(".")


@dataclass
class EpisodePrompts:
    """The text of each turn of one episode."""

    settings: PromptSettings
    observation: str
    _past: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.task = task_of(self.observation)

    def acted(self, action: str, observation: str) -> None:
        """`action` was taken, and the game then said `observation`."""
        if observation == NOTHING and self.settings.invalid_actions == "left_out":
            return
        self._past.append((self.observation, action))
        self.observation = observation

    def text(self, actions: Sequence[str]) -> str:
        """The prompt of the turn that shows `observation`."""
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
