"""Names of metrics: one writer each, whatever users call their rewards and kinds."""

from __future__ import annotations

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

from armature.components.contracts import metrics
from armature.components.contracts.metrics import counted_reasons, merged, metric_part, metrics_below

HOSTILE = [
    *("", " ", ".", "..", "/", "a/b", "a_b", "a//b", "../x", "a!", "a?", "a:b", "a\n"),
    *("é", "e\u0301", "x" * 300, "$x$"),
]
names = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"]), max_size=12))


def test_metric_examples_of_docstrings():
    assert doctest.testmod(metrics).attempted >= 2 and doctest.testmod(metrics).failed == 0


def test_rejects_metric_written_twice():
    with pytest.raises(ValueError) as refused:
        merged(trainer={"loss": 1.0, "reward/std": 0.5}, rollouts={"reward": 1.0}, batch={"reward/std": 0.7})
    assert {"'reward/std'", "trainer", "batch"} <= set(re.findall(r"'[^']+'|\w+", str(refused.value)))


@given(st.lists(names, unique=True, max_size=20))
def test_every_name_gets_a_unique_valid_metric(chosen):
    result = metrics_below("reward_parts", {name: number for number, name in enumerate(chosen)})
    assert sorted(result.values()) == list(range(len(chosen)))
    for name in result:
        _validate_metric_name(name)
        assert len(name) <= MAX_ENTITY_KEY_LENGTH and name.count("/") == 1


@pytest.mark.parametrize(
    "name", ["correct", "mean", "std", "reward", "total", "count", "box_iou", "a-b", "v1.2", "two words"]
)
def test_valid_metric_names_stay(name):
    assert metric_part(name) == name


def test_shared_reason_is_counted_for_failures_and_drops():
    history = [{"failures/bad_reward": 2.0, "drops/bad_reward": 1.0, "reward": 1.0}, {"drops/group_agrees": 4.0}]
    assert counted_reasons(history) == {"bad_reward": 3, "group_agrees": 4}
