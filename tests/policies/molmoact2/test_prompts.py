"""Words, states and budgets against what the specification says of the released model."""

from __future__ import annotations

import numpy as np
import pytest

from armature.components.policies.molmoact2.processing.processor import (
    image_labels,
    normalize_language,
    sequence_budget,
    state_bins,
    wrap,
)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("Pick up the black bowl.", "pick up the black bowl"),
        ("  Pick\tup \n the bowl  ", "pick up the bowl"),
        ("Task: Pick up the bowl!", "pick up the bowl"),
        ("instruction - open the drawer", "open the drawer"),
        ("language_instruction: open it", "open it"),
        ("The task is to open the drawer.", "open the drawer"),
        ('"Your task is to open the drawer."', "open the drawer"),
        ("\u201copen the drawer\u2026\u201d", "open the drawer"),
        ("[goal: (open the drawer).]", "open the drawer"),
        ("Task: the task is to open it", "open it"),
        ("Open it. Then close it!", "open it; then close it"),
        ("Open it... Close it?", "open it; close it"),
        ("v1.5 of it", "v1; 5 of it"),
        ("tasks are many", "tasks are many"),
        ("", ""),
        (" .!? ", ""),
    ],
)
def test_a_task_is_reduced_to_its_words(given: str, wanted: str) -> None:
    assert normalize_language(given) == wanted
    assert normalize_language(wanted) == wanted or "; " in wanted


def test_setup_and_control_are_wrapped_once() -> None:
    assert wrap("one arm", "setup", True) == "<setup_start>one arm<setup_end>"
    assert wrap("<setup_start>one arm<setup_end>", "setup", True) == "<setup_start>one arm<setup_end>"
    assert wrap("joints", "control", False) == "joints"
    assert wrap("", "control", True) == ""


def test_images_are_labeled_from_two_on() -> None:
    assert [image_labels(count) for count in range(3)] == [(), ("",), ("Image 1", "Image 2")]


def test_a_state_is_binned_to_the_nearest_halves_to_even() -> None:
    given = np.array([-1, 1, 0, np.nan, np.inf, -np.inf, 7, -7, -0.5, 0.25], np.float32)
    assert state_bins(given, 256).tolist() == [0, 255, 128, 128, 255, 0, 255, 0, 64, 159]
    assert state_bins(np.array([0.0], np.float32), 2).tolist() == [0]


@pytest.mark.parametrize(
    ("parts", "tokens"),
    [
        ((2, 8, 7, 10, True), 640),
        ((2, 8, 7, 10, False), 576),
        ((2, 8, 7, 30, True), 768),
        ((3, 14, 14, 30, True), 1216),
    ],
)
def test_the_budget_is_the_published_one(parts: tuple[int, int, int, int, bool], tokens: int) -> None:
    assert sequence_budget(*parts) == tokens
