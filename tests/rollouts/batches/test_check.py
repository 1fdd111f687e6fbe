"""Samples that cannot be trained on are named by row and field, and dropped when a batch is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from armature.components.contracts.batches import Sample
from armature.components.rollouts.batches.table import check_samples, sample_defect
from tests.builders import make_sample
from tests.refusals import refused

IDS = [5, 6, 7, 8]
VOCABULARY = (10, 12)


def sample(**changes: Any) -> Sample:
    logprobs = np.array([0, 0, -0.5, -3], np.float32)
    return make_sample(**({"behavior_logprobs": logprobs} | changes))


def changed(name: str, at: int, value: float) -> dict[str, Any]:
    values = getattr(sample(), name).copy()
    values[at] = value
    return {name: values}


SOUND = {
    "as made": {},
    "an id of the prompt that cannot be sampled": changed("input_ids", 0, 11),
    "NaN where nothing is trained": changed("behavior_logprobs", 0, np.nan),
    "a log-softmax just above zero": changed("behavior_logprobs", 2, 1e-6),
    "nothing trained": {"loss_mask": np.zeros(4, bool)},
}
POISONED = {
    "negative id": (changed("input_ids", 2, -1), "input_ids", -1, 9),
    "negative id in the prompt": (changed("input_ids", 0, -2), "input_ids", -2, 11),
    "sampled beyond the head": (changed("input_ids", 3, 10), "input_ids", 10, 9),
    "prompt beyond the embedding": (changed("input_ids", 0, 12), "input_ids", 12, 11),
    "ids that are not integers": ({"input_ids": np.array(IDS, np.float32)}, "input_ids", "float32"),
    "ids in two dimensions": ({"input_ids": np.array([IDS])}, "input_ids", (1, 4)),
    "no ids": ({"input_ids": np.array([], np.int32)}, "input_ids", (0,)),
    "a list": ({"input_ids": IDS}, "input_ids", "list"),
    "short mask": ({"loss_mask": np.ones(3, bool)}, "loss_mask", (3,), (4,)),
    "mask of integers": ({"loss_mask": np.array([0, 0, 1, 1])}, "loss_mask", "int64"),
    "first token trained": (changed("loss_mask", 0, True), "loss_mask"),
    "long log-probs": ({"behavior_logprobs": np.zeros(5, np.float32)}, "behavior_logprobs", (5,), (4,)),
    "NaN": (changed("behavior_logprobs", 3, np.nan), "behavior_logprobs", 1),
    "impossible": (changed("behavior_logprobs", 3, -np.inf), "behavior_logprobs", 1),
    "a probability above one": (changed("behavior_logprobs", 3, 0.25), "behavior_logprobs", 0.25),
    "versions missing": ({"policy_versions": np.array([], np.int32)}, "policy_versions", (0,), (4,)),
    "endless advantage": (changed("advantages", 2, np.inf), "advantages", 1),
    "endless reward": ({"reward": float("-inf")}, "reward", "-inf"),
}


@pytest.mark.parametrize("name", SOUND)
def test_valid_samples_pass(name):
    check_samples([sample(**SOUND[name])], VOCABULARY)


@pytest.mark.parametrize("name", POISONED)
def test_invalid_sample_is_named(name):
    changes, *values = POISONED[name]
    with refused("sample_not_trainable", "batch 7, row 1, sample bad", *values):
        check_samples([sample(), replace(sample(**changes), sample_id="bad")], VOCABULARY, "batch 7")
    assert sample_defect(sample(**changes), VOCABULARY) is not None
