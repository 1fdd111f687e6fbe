"""The rewards that run in our own process, against values by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.refusals import refused

from .grading import graded


@pytest.mark.parametrize("answer", ["B", "(b)", 1])
def test_letter_is_compared_with_every_form_of_the_answer(answer: Any) -> None:
    for completion, expected in {" (B) ": 1.0, "It must be C, not B": 0.0, "E": 0.0, "Big": 0.0, "BB": 0.0}.items():
        assert graded("choice", completion, answer) == expected, completion


BAD_BOXES = [
    None,
    [],
    [1, 2, 3],
    [0, 0, 0, 5],
    "0,0,1,1",
    [[0, 0, 1, 1], None],
    [0, 0, float("nan"), 1],
    [0, 0, True, 1],
]
BAD_ANSWERS: dict[str, list[Any]] = {
    "choice": ["E", 4, -1, True, None, 1.5, ["B"], "cat", ""],
    "number": [None, "ten", True, [], {}, [1, None], "1 and 2", float("nan"), 10**400],
    "box_iou": BAD_BOXES,
    "point_in_box": BAD_BOXES,
    "exact_match": [None, {}, [], "", "  ", [None], [["a"]], ["a", ""]],
}


@pytest.mark.parametrize(
    ("name", "answer"), [(name, each) for name, answers in BAD_ANSWERS.items() for each in answers]
)
def test_invalid_answer_of_a_row_raises_bad_answer(name: str, answer: Any) -> None:
    with refused("bad_answer", f"{name}: "):
        graded(name, "1", answer)


def test_number_of_choices_is_a_setting() -> None:
    assert graded("choice", "E", "E", choices=5) == 1.0


@pytest.mark.parametrize(("completion", "number"), [("-3 / 4", -0.75), ("6.02 x 10^23", 6.02e23), ("x2 is 3", 3.0)])
def test_number_is_compared_with_each_answer(completion: str, number: float) -> None:
    assert graded("number", completion, number) == 1.0
    assert graded("number", completion, -number) == 0.0
    assert graded("number", completion, [17.25, str(number)]) == 1.0


@pytest.mark.parametrize(
    ("completion", "arguments", "expected"),
    [
        ("cat", {}, 0.0),
        ("10.5", {"absolute": 0.5}, 1.0),
        ("10.51", {"absolute": 0.5}, 0.0),
        ("9", {"relative": 0.1}, 1.0),
        ("8.9", {"relative": 0.1}, 0.0),
        ("8.9", {"relative": 0.1, "absolute": 2.0}, 1.0),
        ("10 of 12", {"take": "first"}, 1.0),
        ("10 of 12", {}, 0.0),
        ("10 apples", {"take": "only"}, 0.0),
        (" 10. ", {"take": "only"}, 1.0),
        ("10%", {}, 0.0),
        ("10%", {"percent": "ignored"}, 1.0),
        ("<answer>10</answer> 11", {"extract": "<answer>"}, 1.0),
    ],
)
def test_number_within_its_tolerance_counts(completion: str, arguments: dict[str, Any], expected: float) -> None:
    assert graded("number", completion, 10, **arguments) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("[0, 0, 10, 10]", 1.0),
        ("(0,0),(10,10)", 1.0),
        ("<|box_start|>(0,0),(10,10)<|box_end|>", 1.0),
        ('```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]\n```', 1.0),
        ("\uff080\uff0c0\uff09\uff0c\uff0810\uff0c10\uff09", 1.0),
        ("no [0,0,1,1], rather [0.0, 0.0, 10.0, 10.0]", 1.0),
        ("[5, 0, 15, 10]", 50 / 150),
        ("[0, 0, 10, 5]", 0.5),
        ("[10, 0, 20, 10]", 0.0),
        ("[10, 10, 0, 0]", 0.0),
        ("[0, 0, 10]", 0.0),
        ("somewhere", 0.0),
    ],
)
def test_box_iou_equals_value_by_hand(completion: str, expected: float) -> None:
    assert graded("box_iou", completion, [0, 0, 10, 10]) == pytest.approx(expected)
    assert graded("box_iou", completion, [[90, 90, 91, 91], [0, 0, 10, 10]]) == pytest.approx(expected)
    assert graded("box_iou", completion, [0, 0, 10, 10], threshold=0.5) == float(expected >= 0.5)


def test_box_units_and_answer_form() -> None:
    row = {"width": 200, "height": 100}
    arguments: dict[str, Any] = {"answer_form": "xywh"}
    for units, completion in [
        ("fraction", "[0.25, 0.25, 0.5, 0.75]"),
        ("percent", "[25, 25, 50, 75]"),
        ("thousandths", "(250,250),(500,750)"),
        ("answer", "[50, 25, 100, 75]"),
    ]:
        assert graded("box_iou", completion, [50, 25, 50, 50], row, units=units, **arguments) == pytest.approx(1.0)
    with refused("bad_answer", "box_iou: ", "'width'", None):
        graded("box_iou", "[0, 0, 1, 1]", [0, 0, 1, 1], units="percent")


@pytest.mark.parametrize(
    ("completion", "units", "expected"),
    [
        ("(50, 20)", "answer", 1.0),
        ("[50, 20]", "answer", 1.0),
        ("\uff08\uff15\uff10\uff0c\uff12\uff10\uff09", "answer", 1.0),
        ('{"point_2d": [50.5, 20]}', "answer", 1.0),
        ("(40, 10)", "answer", 1.0),
        ("(39.9, 10)", "answer", 0.0),
        ("(50, 20), no: (0, 0)", "answer", 0.0),
        ('<point x="25.0" y="20.0" alt="the cat">the cat</point>', "percent", 1.0),
        ('<point x="50.0" y="20.0" alt="the cat">the cat</point>', "percent", 0.0),
        ("<point x='25.0' y='20.0'>the cat</point>", "percent", 1.0),
        ("(.25, .2)", "fraction", 1.0),
        ("(+25, +20.0)", "percent", 1.0),
        ("there", "answer", 0.0),
    ],
)
def test_point_in_box_includes_edges(completion: str, units: str, expected: float) -> None:
    row = {"width": 200, "height": 100}
    assert graded("point_in_box", completion, [40, 10, 60, 30], row, units=units) == expected
    assert graded("point_in_box", completion, [[0, 90, 1, 91], [40, 10, 60, 30]], row, units=units) == expected


@pytest.mark.parametrize(
    ("completion", "arguments", "expected"),
    [
        ("abcde", {"at_most": 5}, 1.0),
        ("abcdef", {"at_most": 5}, 0.0),
        ("a b c", {"at_most": 3, "unit": "words"}, 1.0),
        ("abcdef", {"at_most": 5, "slope": 4}, 0.75),
        ("a" * 9, {"at_most": 5, "slope": 4}, 0.0),
        ("a" * 99, {"at_most": 5, "slope": 4}, 0.0),
        ("a", {"at_least": 3, "slope": 4}, 0.5),
        ("", {"at_least": 1}, 0.0),
        ("<answer>ab</answer>", {"at_most": 2, "extract": "<answer>"}, 1.0),
        ("ab", {"at_least": 1, "extract": "<answer>"}, 0.0),
    ],
)
def test_length_reward_is_linear_between_its_bounds(
    completion: str, arguments: dict[str, Any], expected: float
) -> None:
    assert graded("length", completion, None, **arguments) == expected


RIGHT_TAGS = ["<think>so</think><answer>red</answer>", " <think>so</think>\n\n<answer>red</answer>\n"]
WRONG_TAGS = [
    "red",
    "<think>so</think><answer>red</answer> indeed",
    "well <think>so</think><answer>red</answer>",
    "<answer>red</answer><think>so</think>",
    "<think>so<answer>red</answer></think>",
    "<think>so</think><answer> </answer>",
    "<think>so</think><answer>red</answer><answer>red</answer>",
    "<think>so</think><answer>red",
    "so</think><answer>red</answer>",
]


@pytest.mark.parametrize("completion", [*RIGHT_TAGS, *WRONG_TAGS])
def test_rewards_only_tags_in_order(completion: str) -> None:
    assert graded("format_tags", completion, None) == float(completion in RIGHT_TAGS)


def test_first_tag_may_be_in_the_prompt() -> None:
    assert graded("format_tags", "so</think><answer>red</answer>", None, first_is_open=True) == 1.0


EQUAL = [
    *(("red", "red"), (" Red.\n", "red"), ("**Red**", "red"), ("light  \t blue", "Light Blue")),
    *(("\uff52\uff45\uff44", "red"), ("ﬁve", "five"), ("STRASSE", "straße"), ("?", "?")),
    *(("b", ["a", "b"]), ("3", 3), ("-3.", -3), ("True", True)),
]
UNEQUAL = [
    *(("it is red", "red"), ("", "red"), ("...", "?"), ("re\x00d", "red")),
    *(("3", -3), (".5", "5"), ("12%", "12")),
]


@pytest.mark.parametrize(("completion", "answer"), [*EQUAL, *UNEQUAL])
def test_words_are_compared_normalized(completion: str, answer: Any) -> None:
    assert graded("exact_match", completion, answer) == float((completion, answer) in EQUAL)


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
def test_relative_tolerance_accepts_near_numbers(completion: str, answer: Any, expected: float) -> None:
    """The relaxed accuracy of ChartQA, by hand."""
    assert graded("exact_match", completion, answer, relative=0.05) == expected


def test_case_and_punctuation_count_if_set() -> None:
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
def test_extract_selects_graded_part(extract: str, completion: str, expected: float) -> None:
    assert graded("exact_match", completion, "red", extract=extract) == expected


@pytest.mark.parametrize("text", ["\\boxed{" * 140_000, "{" * 10**6, "<answer>" * 125_000, "\\" * 10**6])
@pytest.mark.parametrize("extract", ["boxed", "<answer>", "</answer>"])
@pytest.mark.timeout(10)
def test_million_characters_are_graded_in_seconds(text: str, extract: str) -> None:
    assert graded("exact_match", text, "red", extract=extract) == 0.0
