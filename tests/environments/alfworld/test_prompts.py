"""Parsing of answers, and prompts with past steps."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.environments.alfworld.prompts import (
    ACTION_LIMIT,
    EpisodePrompts,
    ParsedAction,
    PromptSettings,
    parse_action,
)
from tests.refusals import refused

from .games_of import PROMPT

INTRODUCTION = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a "
    "bed 1, and a desk 2.\n\nYour task is to: put a book in desk."
)


@pytest.mark.parametrize(
    ("answer", "thinking", "action", "defect"),
    [
        ("<think>a</think><action>Go to Bed 1</action>", True, "go to bed 1", None),
        ("<ACTION> look </ACTION> <action>help</action>", False, "look", None),
        ("<action>look</action>", True, "look", "format"),
        ("<THINK>a</THINK><action>look</action>", True, "look", "format"),
        ("I will now go to the fridge that is over there", False, "the fridge that is over there", "format"),
        ("</action>look<action>", False, "?/action?look?action?", "format"),
        ("<action></action>", False, "", "format"),
        ("好<action>look</action>", False, "look", "format"),
        ("<action>go to\n\n  bed 1</action>", False, "go to bed 1", None),
        ("<action>go to| bed 1</action>", False, "go to? bed 1", None),
        ("<action>look <|image|></action>", False, "look ??image??", None),
        (f"<action>{'a' * 300}</action>", False, "a" * ACTION_LIMIT, "format"),
    ],
)
def test_parse_action(answer: str, thinking: bool, action: str, defect: str | None) -> None:
    assert parse_action(answer, thinking) == ParsedAction(action, defect)


pieces = st.sampled_from(["<action>", "</action>", "<think>", "</think>", "look", "{", "}", "\ud800", "\0", "好", "\n"])


@settings(max_examples=600)
@given(st.lists(pieces | st.text(max_size=20), max_size=30).map("".join), st.booleans())
def test_parse_action_returns_command_characters_for_any_answer(answer: str, thinking: bool) -> None:
    parsed = parse_action(answer, thinking)
    assert re.fullmatch(r"[a-z0-9 /?]*", parsed.action) and len(parsed.action) <= ACTION_LIMIT
    assert parsed.defect in (None, "format")
    if parsed.defect is None:
        assert "<action>" in answer.lower() and "</action>" in answer.lower() and parsed.action


def dialogue_of(**changes: Any) -> EpisodePrompts:
    return EpisodePrompts(PromptSettings.model_validate({**PROMPT, **changes}), INTRODUCTION)


def test_prompt_recalls_the_last_steps_and_the_goal() -> None:
    dialogue = dialogue_of()
    assert dialogue.task == "put a book in desk"
    first = dialogue.text(["go to bed 1", "help", "look"])
    assert first.startswith("You are in the middle") and "ALFRED" not in first and "task is" not in first
    assert first.endswith("Goal: put a book in desk\ngo to bed 1, look")
    for step in range(3):
        dialogue.record_action(f"do {step}", f"seen {step + 1}")
    text = dialogue.text(["look"])
    assert text == "2. seen 1 > do 1\n3. seen 2 > do 2\nNow: seen 3\nGoal: put a book in desk\nlook"


def test_without_history_every_turn_uses_the_first_template() -> None:
    dialogue = dialogue_of(history_length=0, first="{observation}|{task}")
    dialogue.record_action("look", "You see nothing.")
    assert dialogue.text([]) == "You see nothing.|put a book in desk"


def test_template_places_are_filled_only_once() -> None:
    dialogue = dialogue_of(later="{task}: {history}{observation}", history_length=1)
    dialogue.record_action("look", "{actions}")
    dialogue.record_action("{task}", "{history}")
    assert dialogue.text(["look"]) == "put a book in desk: 2. {actions} > {task}{history}"


@pytest.mark.parametrize("shown", [True, False])
def test_invalid_actions_setting_controls_history(shown: bool) -> None:
    dialogue = dialogue_of(invalid_actions="shown" if shown else "left_out")
    dialogue.record_action("go to bed 1", "On the bed 1, you see a book 1.")
    before = dialogue.text(["look"])
    dialogue.record_action("open bed 1", "Nothing happens.")
    after = dialogue.text(["look"])
    assert (after != before) is shown
    assert ("2. On the bed 1, you see a book 1. > open bed 1\nNow: Nothing happens." in after) is shown


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"first": "{goal}"}, "unknown_place", ["first", "{goal}", "actions"]),
        ({"later": "{room}"}, "unknown_place", ["later", "{room}"]),
        ({"first": "{room} { task }: {actions}"}, "mistyped_place", ["first", "{ task"]),
        ({"past": "{step. {action}"}, "mistyped_place", ["past", "{step"]),
        ({"first": "{room}: {actions}"}, "task_place_missing", ["first", "{task}"]),
        ({"later": "{observation}: {actions}"}, "task_place_missing", ["later", "{task}"]),
        ({"action": "a"}, "action_place_missing", ["{action}"]),
        ({"answer": "{action}"}, "answer_template_unreadable", []),
        ({"thinking": True}, "answer_template_unreadable", []),
    ],
)
def test_rejects_invalid_templates(change: dict[str, object], code: str, values: list[str]) -> None:
    with refused(code, *values):
        PromptSettings.model_validate({**PROMPT, **change})


def test_first_observation_without_goal_raises_value_error() -> None:
    with pytest.raises(ValueError):
        EpisodePrompts(PromptSettings.model_validate(PROMPT), "You see a bed 1.")
