"""Exact match and what it is compared with, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from .grading import graded


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("red", "red", 1.0),
        (" Red.\n", "red", 1.0),
        ("**Red**", "red", 1.0),
        ("light  \t blue", "Light Blue", 1.0),
        ("\uff52\uff45\uff44", "red", 1.0),
        ("ﬁve", "five", 1.0),
        ("STRASSE", "straße", 1.0),
        ("it is red", "red", 0.0),
        ("", "red", 0.0),
        ("...", "?", 0.0),
        ("?", "?", 1.0),
        ("b", ["a", "b"], 1.0),
        ("3", 3, 1.0),
        ("3", -3, 0.0),
        ("-3.", -3, 1.0),
        (".5", "5", 0.0),
        ("12%", "12", 0.0),
        ("True", True, 1.0),
        ("re\x00d", "red", 0.0),
    ],
)
def test_words_are_compared_normalized(completion: str, answer: Any, expected: float) -> None:
    assert graded("exact_match", completion, answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("14", ["14"], 1.0),
        ("14.6", ["14"], 1.0),
        ("14.8", ["14"], 0.0),
        ("13.3", 14, 1.0),
        ("58%", "0.57", 1.0),
        ("14.6 apples", "14", 0.0),
        ("germany", ["Germany"], 1.0),
        ("Germany 14", "14", 0.0),
        ("0.1", "0", 0.0),
        ("-14", "14", 0.0),
        ("14", ["Germany", "14.5"], 1.0),
    ],
)
def test_numbers_may_be_near(completion: str, answer: Any, expected: float) -> None:
    """The relaxed accuracy of ChartQA, by hand."""
    assert graded("exact_match", completion, answer, relative=0.05) == expected


def test_case_and_punctuation_may_count() -> None:
    assert graded("exact_match", "RED", "red", ignore_case=False) == 0.0
    assert graded("exact_match", "red.", "red", ignore_punctuation=False) == 0.0


@pytest.mark.parametrize(
    ("extract", "completion", "expected"),
    [
        ("<answer>", "<think>blue</think><answer> red </answer>", 1.0),
        ("<answer>", "<answer>blue</answer> no: <answer>red</answer>.", 1.0),
        ("<answer>", "<answer>red", 0.0),
        ("<answer>", "red</answer>", 0.0),
        ("<answer>", "red", 0.0),
        ("</think>", "<think>blue</think>\nred", 1.0),
        ("</think>", "red", 0.0),
        ("boxed", r"so \boxed{red}", 1.0),
        ("boxed", r"\boxed{blue}, or \boxed {red}!", 1.0),
        ("boxed", r"\boxed{blue \boxed{red}", 1.0),
        ("boxed", r"\boxed{red", 0.0),
        ("boxed", r"}}} \boxed{red} }}", 1.0),
        ("boxed", r"\boxed{red\}}", 1.0),
        ("boxed", r"\boxed{red\}", 0.0),
        ("boxed", "red", 0.0),
    ],
)
def test_a_part_of_the_completion_is_graded(extract: str, completion: str, expected: float) -> None:
    assert graded("exact_match", completion, "red", extract=extract) == expected


@pytest.mark.parametrize("text", ["\\boxed{" * 140_000, "{" * 10**6, "<answer>" * 125_000, "\\" * 10**6])
@pytest.mark.parametrize("extract", ["boxed", "<answer>", "</answer>"])
@pytest.mark.timeout(10)
def test_a_million_characters_take_a_moment(text: str, extract: str) -> None:
    assert graded("exact_match", text, "red", extract=extract) == 0.0
