"""From a row to an observation: templates, several images, system messages, conversations."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import EarlierMessage, Observation
from armature.components.contracts.images import EncodedImage
from armature.components.environments.dataset.environment import DatasetEnvironment
from armature.components.rollouts.play import Conversation, SharedImages
from tests.refusals import refused

from .tables import bars, data_url, environment_of, write_jsonl

SPLIT = {"by": "column", "column": "s", "train": "a", "heldout": "b"}


def made(folder: Path, row: dict[str, Any], **changes: Any) -> tuple[DatasetEnvironment, Observation]:
    """Make an environment of one row, which may use the images 1.png to 3.png, and return its first observation."""
    for number in (1, 2, 3):
        (folder / f"{number}.png").write_bytes(bars(number))
    write_jsonl(folder / "rows.jsonl", [{**row, "s": split} for split in "ab"])
    args = {"prompt": "", "images": [], "answer": "a" if "a" in row else "", "kind": "", "split": SPLIT, **changes}
    environment = environment_of({"source": str(folder / "rows.jsonl")}, **args)
    (task,) = environment.tasks("train")
    return environment, asyncio.run(environment.episode(task).reset())


def readable(content: tuple[Any, ...]) -> list[str]:
    names = {bars(number): f"[{number}]" for number in (1, 2, 3)}
    return [names[part.data] if isinstance(part, EncodedImage) else part for part in content]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("{q}", ["[1]", "[2]", "[3]", "Which?"]),
        ("{q}{images}", ["Which?", "[1]", "[2]", "[3]"]),
        (
            "{image}first, {images}then {q} {{not a column}}",
            ["[1]", "first, ", "[2]", "[3]", "then Which? {not a column}"],
        ),
        ("{image}{image}{image}{n}, {share}, {yes}", ["[1]", "[2]", "[3]", "3, 0.5, true"]),
        ("{images}{choices}", ["[1]", "[2]", "[3]", "A. cat\nB. 7"]),
        ("{images}{choices[1]}, not {choices[0]}", ["[1]", "[2]", "[3]", "7, not cat"]),
    ],
)
def test_prompt_template_places_images_and_columns(prompt: str, shown: list[str], tmp_path: Path) -> None:
    values = {"q": "Which?", "n": 3, "share": 0.5, "yes": True, "choices": ["cat", 7], "a": "x"}
    row = {**values, "i": "1.png", "more": ["2.png", "3.png"]}
    _, observation = made(tmp_path, row, prompt=prompt, images=["i", "more"])
    assert readable(observation.content) == shown


def test_image_token_in_a_column_is_an_image_place(tmp_path: Path) -> None:
    row = {"q": "<image>Is {image} like <image>?", "i": ["1.png", "2.png"], "a": "x"}
    _, observation = made(tmp_path, row, prompt="Say: {q}", images="i", image_token="<image>")
    assert readable(observation.content) == ["Say: ", "[1]", "Is {image} like ", "[2]", "?"]


def test_unpaired_surrogate_makes_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "\\ud800", "s": "a"}\n{"q": "\\ud800", "s": "b"}\n')
    with refused("rows_unusable", "2 bad_text"):
        args = {"prompt": "{q}", "images": [], "answer": "", "kind": "", "split": SPLIT}
        list(environment_of({"source": str(tmp_path / "rows.jsonl")}, **args).tasks("train"))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, "prompt_or_conversation"),
        ({"prompt": "a", "conversation": "b"}, "prompt_or_conversation"),
        ({"prompt": "{image}"}, "image_columns_missing"),
        ({"prompt": "a", "system": "{image}"}, "image_place_unused"),
        ({"prompt": "{"}, "value_error"),
        ({"conversation": "c", "system": "a"}, "two_system_messages"),
        ({"prompt": "a", "rewards": []}, "too_short"),
        ({"prompt": "a", "split": {"by": "hash", "heldout": 1.0}}, "less_than"),
    ],
)
def test_rejects_contradictory_settings(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    with refused(code, *list(changes)[-1:]):
        made(tmp_path, {"q": "x"}, **changes)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CHAT = [
    {"role": "system", "content": "You count."},
    {"role": "user", "content": [{"type": "image"}, text("One bar?")]},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": [text("Two?"), {"type": "image_url", "image_url": {"url": "2.png"}}]},
    {"role": "assistant", "content": [text("yes")]},
]


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize("as_text", [False, True])
def test_model_continues_after_the_last_user_message(as_text: bool, tmp_path: Path) -> None:
    row = {"chat": json.dumps(CHAT) if as_text else CHAT, "i": "1.png"}
    environment, observation = made(tmp_path, row, conversation="chat", images="i")
    (task,) = environment.tasks("train")
    assert [(message.role, readable(message.content)) for message in observation.earlier] == [
        ("system", ["You count."]),
        ("user", ["[1]", "One bar?"]),
        ("assistant", ["no"]),
    ]
    assert readable(observation.content) == ["Two?", "[2]"]
    assert environment.demonstration(task) == ["yes"]
    assert asyncio.run(environment.episode(task).step("yes")).reward_parts == {"exact_match": 1.0}


def test_conversation_is_sent_as_separate_messages(tmp_path: Path) -> None:
    _, observation = made(tmp_path, {"chat": CHAT, "i": "1.png"}, conversation="chat", images="i")
    conversation = Conversation(None, SharedImages(ImageStore(tmp_path / "images")), True)
    asyncio.run(conversation.observe(observation))
    expected = json.loads(json.dumps(CHAT[:4]).replace('"2.png"', json.dumps(data_url(bars(2)))))
    expected[1]["content"][0] = {"type": "image_url", "image_url": {"url": data_url(bars(1))}}
    assert conversation.messages == expected and len(conversation.images) == 2
    assert [message["role"] for message in json.loads(conversation.unread())] == ["system", "user", "assistant", "user"]


ASSISTANT = {"role": "assistant", "content": "yes"}
BAD_CHATS: list[Any] = [
    *([], "not JSON", [ASSISTANT], [{"role": "robot", "content": "yes"}]),
    [USER, {"role": "system", "content": "b"}, USER],
    *([{"role": "user", "content": content}] for content in ([{"type": "audio"}], None)),
    [{"role": "system", "content": [{"type": "image"}]}, USER],
]
PART = {"prompt": "{q}", "answer_extract": "<answer>"}


@pytest.mark.parametrize(
    ("reason", "row", "changes"),
    [
        ("image_count", {"q": "x", "i": ["1.png"]}, {"prompt": "{image}{image}{q}", "images": "i"}),
        ("image_count", {"q": "x", "i": ["1.png", "2.png"]}, {"prompt": "{image}{q}", "images": "i"}),
        ("no_text", {"q": "", "i": []}, {"prompt": "{images}{q}", "images": "i"}),
        ("wrong_type", {"q": {"a": 1}, "i": ["1.png"]}, {"prompt": "{q}", "images": "i"}),
        ("too_long", {"q": "x" * 40000, "i": ["1.png"]}, {"prompt": "{q}", "images": "i"}),
        ("too_long", {"q": "x", "a": "x" * 10**6}, {"prompt": "{q}"}),
        *(("no_text", {"c": choices, "a": "x"}, {"prompt": "{c[1]}"}) for choices in (["cat"], "cat", None)),
        *(("no_answer", {"q": "x", "a": answer}, PART) for answer in ("3", "<answer> </answer>")),
        ("wrong_type", {"q": "x", "a": 3}, PART),
        ("no_answer", {"chat": [USER, {**ASSISTANT, "content": " "}]}, {"conversation": "chat"}),
        *(("bad_conversation", {"chat": chat}, {"conversation": "chat"}) for chat in BAD_CHATS),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unusable_row_is_counted_by_reason(
    reason: str, row: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    with refused("rows_unusable", "2 of 2", f"2 {reason}"):
        made(tmp_path, row, **changes)


def test_system_and_demonstration_templates_use_the_row(tmp_path: Path) -> None:
    row = {"q": "Which?", "who": "a judge", "a": "x", "why": "since"}
    environment, observation = made(
        tmp_path, row, prompt="{q}", system="You are {who}.", answer="a", demonstration="<t>{why}</t>{a}"
    )
    assert observation == Observation(("Which?",), earlier=(EarlierMessage("system", ("You are a judge.",)),))
    (task,) = environment.tasks("train")
    assert environment.demonstration(task) == ["<t>since</t>x"]


def test_answer_extract_takes_a_part_of_the_column(tmp_path: Path) -> None:
    environment, _ = made(tmp_path, {"q": "How many?", "a": "Two and one: <answer> 3 </answer>"}, **PART)
    (task,) = environment.tasks("train")
    assert environment.demonstration(task) == ["3"]


def test_rewards_get_the_row_without_images(tmp_path: Path) -> None:
    from armature.components.environments.dataset.rows import row_for_rewards

    environment, _ = made(tmp_path, {"q": "x", "i": "1.png", "a": "x"}, prompt="{q}", images="i")
    row = {"i": b"1", "q": "x", "raw": b"2", "nested": {"data": b"3", "n": None}, "list": [b"4", 5]}
    assert row_for_rewards(row, environment.settings) == {"q": "x", "nested": {"n": None}, "list": [5]}
