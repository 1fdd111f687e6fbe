"""Metrics of a step: names that users choose for reward parts do not replace other metrics."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.contracts.metrics import merged
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.rl.metrics import rollout_metrics
from armature.components.rollouts.batches.table import build_batch
from armature.components.rollouts.settings import BatchSettings
from armature.components.vlm.metrics import batch_report
from tests.builders import make_trajectory, make_turn
from tests.rollouts.batches.test_recipes import TurnsAsSamples

PLAIN = GenerateOutputs(
    [make_trajectory(f"t{n}", "g", [make_turn(reward)]) for n, reward in enumerate((0.0, 1.0, 1.0))]
)
OURS = ["reward", "mean", "std", "rollout_std", "sample_mean", "total", "count", "", "a/b", "a_b", "../reward", "turns"]


def step_metrics(outputs: GenerateOutputs) -> dict[str, float]:
    """Merge the metrics of a step into one dictionary, as a run does. It is an error if a name occurs twice."""
    built = build_batch(outputs, TurnsAsSamples(), BatchSettings(max_sequence_tokens=64))
    return merged(batch=batch_report(built.samples), built=built.metrics, rollouts=rollout_metrics(outputs))


@settings(max_examples=25)
@given(st.lists(st.sampled_from(OURS), unique=True))
def test_reward_part_names_do_not_replace_metrics(parts: list[str]) -> None:
    values = {name: 100.0 + number for number, name in enumerate(parts)}
    named = [
        make_trajectory(f"t{n}", "g", [make_turn(one.reward, reward_parts=values)])
        for n, one in enumerate(PLAIN.trajectories)
    ]
    metrics, plain = step_metrics(GenerateOutputs(named)), step_metrics(PLAIN)
    below = {name: value for name, value in metrics.items() if name.startswith("reward_parts/")}
    assert sorted(below.values()) == pytest.approx(sorted(values.values()))
    others = {name: value for name, value in plain.items() if not name.startswith("reward_parts/")}
    assert {name: value for name, value in metrics.items() if name not in below} == others


def test_rollout_means_and_sample_means_are_separate_metrics() -> None:
    """A rollout of two turns makes two samples, another of one turn makes one."""
    two, one = [make_turn(0.5, index=index) for index in (0, 1)], [make_turn(0.0)]
    uneven = GenerateOutputs([make_trajectory("a", "g", two), make_trajectory("b", "g", one)])
    metrics = step_metrics(uneven)
    assert (metrics["reward"], metrics["reward/rollout_std"]) == (0.5, 0.5)
    assert metrics["sequences"] == 3 and metrics["reward/sample_mean"] == pytest.approx(2 / 3)
    assert metrics["reward_parts/correct"] == 0.5
    assert Counter(name.partition("/")[0] for name in metrics)["advantage"] == 1
