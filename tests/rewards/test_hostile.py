"""Whatever a completion is, a reward gives a finite number or fails its rollout by reason, in bounded time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from armature.components.contracts.errors import RolloutFailed
from armature.components.rewards.make import Rewards, make_rewards
from armature.components.rewards.reward import RewardInput, RewardSettings

REASONS = {"bad_answer", "reward_timeout", "reward_died", "reward_error", "reward_invalid"}

EVERY: list[dict[str, Any]] = [
    {"name": "exact_match"},
    {"name": "choice", "choices": 26},
    {"name": "number"},
    {"name": "number", "label": "only", "take": "only", "percent": "ignored"},
    {"name": "box_iou"},
    {"name": "box_iou", "label": "scaled", "units": "percent", "answer_form": "xywh", "threshold": 0.5},
    {"name": "point_in_box"},
    {"name": "length", "at_most": 10, "slope": 5, "unit": "words"},
    {"name": "format_tags"},
    {"name": "regex", "pattern": r"(\w+)\s*$", "group": 1},
    {"name": "json_schema", "json_schema": {"type": "object", "additionalProperties": {"multipleOf": 0.01}}},
]
EXTRACTS = ("all", "boxed", "<answer>", "</think>")

PIECES = (
    "\\boxed{", "{", "}", "\\{", "<answer>", "</answer>", "<think>", "</think>", "[", "]", "(", ")", ",", ".", "-", "%",
    "^", "**", "10^9999", "0^-1", '{"a": 1e999}', '{"a": 1e308}',
    "1", "9" * 20, "1,234", "1e9", "1/0", "\\frac{1}{2}", "B", "(B)", "answer is ", '{"bbox_2d": [0, 0, 1, 1]}', '"',
    '<point x="1" y="2">', "```json\n", "\n```", " ", "\n", "\t", "\0", "\x1b[2J", "\u202e", "\ufeff", "\U0001f600",
    "e\u0301", "\u0661\u0662", "\u00bd", "\u2460", "\u06dd", "\\", "$", "red", "NaN", "Infinity", "a" * 50,
)  # fmt: skip
COMPLETIONS = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
)
ANSWERS = st.one_of(
    st.sampled_from(["red", "B", "3", 3, 1, 0.5, [0, 0, 10, 10], [[0, 0, 10, 10], [5, 5, 6, 6]], ["red", "blue"]]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)
ROWS = st.dictionaries(
    st.sampled_from(["width", "height", "kind"]), st.none() | st.integers() | st.floats() | st.text(max_size=5)
)


def rewards_of(values: dict[str, Any], extract: str) -> Rewards:
    extracting = {} if values["name"] == "format_tags" else {"extract": extract}
    return make_rewards([RewardSettings.model_validate({**values, **extracting})], folder=Path())


@pytest.fixture(scope="module")
def rewards() -> Iterator[list[Rewards]]:
    made = [rewards_of(values, extract) for values in EVERY[:-2] for extract in EXTRACTS]
    made += [rewards_of(values, "all") for values in EVERY[-2:]]
    yield made
    for each in made:
        each.close()


async def graded(rewards: list[Rewards], given: RewardInput) -> list[dict[str, float] | RolloutFailed]:
    values: list[dict[str, float] | RolloutFailed] = []
    for each in rewards:
        try:
            values.append(await each.grade(given))
        except RolloutFailed as failed:
            values.append(failed)
    return values


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(completion=COMPLETIONS, answer=ANSWERS, row=ROWS)
def test_every_input_gives_a_number_or_a_failure_reason(
    rewards: list[Rewards], completion: str, answer: Any, row: dict[str, Any]
) -> None:
    for each, value in zip(rewards, asyncio.run(graded(rewards, RewardInput(completion, answer, row))), strict=True):
        refused = ""
        try:
            each.check(answer)
        except RolloutFailed as failed:
            refused = failed.reason
        if isinstance(value, RolloutFailed):  # for the row's fault alone: no completion leaves its group
            assert value.reason == refused == "bad_answer" or (
                value.reason == "bad_answer" and "column" in value.detail
            )
        else:
            assert refused == "" and all(type(one) is float and 0.0 <= one <= 1.0 for one in value.values())
            assert all(map(math.isfinite, value.values()))


REPEATED = ("\\boxed{", "{", "<answer>", "(1,", "1", "1,234", "(B)", "answer is ", " ", "<point ")


@pytest.mark.parametrize("piece", REPEATED)
@pytest.mark.timeout(60)
def test_long_answers_are_graded_in_linear_time(piece: str) -> None:
    """Every place where a pattern may begin is passed once. Passing it again for each other would take hours."""
    completion = piece * (2 * 10**5 // len(piece))
    answers = {"choice": "B", "number": 3, "box_iou": [0, 0, 10, 10], "point_in_box": [0, 0, 10, 10]}
    for values in EVERY[:-2]:
        reward = rewards_of(values, "all")
        start = time.process_time()
        (value,) = asyncio.run(
            graded([reward], RewardInput(completion, answers.get(values["name"], "red"), {"width": 9, "height": 9}))
        )
        assert not isinstance(value, RolloutFailed), (values, value)
        assert time.process_time() - start < 2, values


def test_reward_processes_accept_a_million_characters() -> None:
    with closing(make_rewards([RewardSettings.model_validate(values) for values in EVERY[-2:]], folder=Path())) as made:
        for piece in ("{", "[", '{"a":', "9", "a ", "\0", "\U0001f600"):
            (value,) = asyncio.run(graded([made], RewardInput(piece * (10**6 // len(piece)), "red", {})))
            assert isinstance(value, dict) or value.reason in REASONS
