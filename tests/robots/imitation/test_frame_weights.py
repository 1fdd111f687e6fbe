"""Weights of frames: a frame with the weight 2 counts as two equal frames, in the loss and in its gradient."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from armature.components.robots.datasets.source import open_sources
from armature.components.robots.imitation.data import PolicyMicroBatch
from armature.components.robots.imitation.trainer import AssembledTraining, assemble
from armature.components.robots.policies.family import family
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks

from .conftest import policy_settings
from .settings import training_settings
from .test_smolvla import POLICY

POLICIES = {
    "smolvla": RobotPolicySettings.model_validate(POLICY),
    "molmoact2": policy_settings(),
    "molmoact2 packed": policy_settings(action_mode="both"),
}


@pytest.fixture(params=POLICIES)
def assembled(request, inputs, tmp_path) -> Any:
    """Return a function that makes the training of a tiny policy."""
    policy = POLICIES[request.param]
    start = inputs["policy"]
    if policy.family == "smolvla":
        start = tmp_path / "policy"
        family("smolvla").make_tiny_policy(start / "checkpoint", policy)
    packing = {"packing": {"max_row_tokens": 512, "max_row_examples": 3}} if "packed" in request.param else {}
    statistics = {"default": json.loads((inputs["statistics"] / "stats.json").read_text())}

    def make(**source: Any) -> AssembledTraining:
        sources = [replace(each, **source) for each in open_sources(inputs["dataset"])]
        training = training_settings(heldout=None, **packing)
        return assemble(start, policy, training, sources, statistics, TrainerProcesses(), Ranks())

    return make


def micro_batch(training: AssembledTraining, frames: list[int], weights: list[float] | None) -> PolicyMicroBatch:
    mixture, encoder = training.updates.mixture, training.updates.encoder
    examples = [encoder.example(mixture.sample(mixture.nth(frame))) for frame in frames]
    return encoder.micro_batch(examples, frames, weights)


def test_weight_counts_as_repetition(assembled) -> None:
    repeated, *weighted = (
        assembled().learner.step([micro_batch(assembled(), frames, weights)])
        for frames, weights in (
            ([1, 5, 5, 5, 9], None),
            *(([1, 5, 9], [scale, 3 * scale, scale]) for scale in (1.0, 1e-4, 2.0**-149, 1e38)),  # float32's limits
        )
    )
    for scaled in weighted:
        for name in ("loss", "grad_norm"):
            assert scaled[name] == pytest.approx(repeated[name], rel=1e-5), "only ratios of weights count"


def test_weights_of_an_update_are_split_over_micro_batches(assembled) -> None:
    training = assembled()
    whole = training.learner.score([micro_batch(training, [1, 5, 9], [0.5, 3.0, 1.0])])
    parts = [micro_batch(training, [1, 5], [0.5, 3.0]), micro_batch(training, [9], [1.0])]
    assert training.learner.score(parts)["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_training_weighs_frames_by_the_column(assembled) -> None:
    training = assembled(frame_weights="timestamp")  # 0 at the first frame of an episode
    updates = training.updates
    assert all(updates.mixture.sample(place).frame > 0 for place in updates.mixture.every())
    for micro in updates[1]:
        assert micro.batch.weights is not None and (micro.batch.weights > 0).all()
    samples = [updates.mixture[position] for position in updates.positions(1)]
    expected = sorted(sample.frame / sources_fps(updates) for sample in samples)
    weights = sorted(float(weight) for micro in updates[1] for weight in micro.batch.weights)
    assert weights == pytest.approx(expected, abs=1e-6)
    assert training.learner.step(updates[1])["loss"] > 0


def sources_fps(updates: Any) -> float:
    return float(updates.mixture.sources[0].dataset.info.fps)
