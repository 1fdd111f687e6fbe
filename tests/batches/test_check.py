"""What cannot be trained on is named by row and field, and dropped where a batch is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from components.batches.check import check_samples, sample_defect
from components.contracts.batches import Sample
from components.contracts.errors import DataError

IDS = [5, 6, 7, 8]
VOCABULARY = (10, 12)


def sample(**changes: Any) -> Sample:
    trained = np.array([False, False, True, True])
    sound = Sample(
        sample_id="s",
        group_id="g",
        trajectory_id="t",
        input_ids=np.array(IDS, np.int32),
        loss_mask=trained,
        behavior_logprobs=np.array([0, 0, -0.5, -3], np.float32),
        policy_versions=np.array([-1, -1, 0, 0], np.int32),
        advantages=np.array([0, 0, 1, 1], np.float32),
        reward=1.0,
        images=(),
    )
    return replace(sound, **changes)


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
    "negative id": (changed("input_ids", 2, -1), "input_ids -1 is not a token id from 0 to 9"),
    "negative id in the prompt": (changed("input_ids", 0, -2), "input_ids -2 is not a token id from 0 to 11"),
    "sampled beyond the head": (changed("input_ids", 3, 10), "input_ids 10 is not a token id from 0 to 9"),
    "prompt beyond the embedding": (changed("input_ids", 0, 12), "input_ids 12 is not a token id from 0 to 11"),
    "ids that are not integers": ({"input_ids": np.array(IDS, np.float32)}, "input_ids holds float32"),
    "ids in two dimensions": ({"input_ids": np.array([IDS])}, "input_ids has shape"),
    "no ids": ({"input_ids": np.array([], np.int32)}, "input_ids has shape"),
    "a list": ({"input_ids": IDS}, "input_ids holds list"),
    "short mask": ({"loss_mask": np.ones(3, bool)}, "loss_mask has shape"),
    "mask of integers": ({"loss_mask": np.array([0, 0, 1, 1])}, "loss_mask holds int64"),
    "first token trained": (changed("loss_mask", 0, True), "loss_mask is set on the first token"),
    "long log-probs": ({"behavior_logprobs": np.zeros(5, np.float32)}, "behavior_logprobs has shape"),
    "NaN": (changed("behavior_logprobs", 3, np.nan), "behavior_logprobs of 1 trained tokens are not finite"),
    "impossible": (changed("behavior_logprobs", 3, -np.inf), "behavior_logprobs of 1 trained tokens are not finite"),
    "a probability above one": (
        changed("behavior_logprobs", 3, 0.25),
        "behavior_logprobs 0.25 is not a log-probability",
    ),
    "versions missing": ({"policy_versions": np.array([], np.int32)}, "policy_versions has shape"),
    "endless advantage": (changed("advantages", 2, np.inf), "advantages of 1 trained tokens are not finite"),
    "endless reward": ({"reward": float("-inf")}, "reward is -inf"),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_samples_pass(name: str) -> None:
    check_samples([sample(**SOUND[name])], VOCABULARY)


@pytest.mark.parametrize("name", POISONED)
def test_a_poisoned_sample_is_named(name: str) -> None:
    changes, what = POISONED[name]
    with pytest.raises(DataError) as refused:
        check_samples([sample(), replace(sample(**changes), sample_id="bad")], VOCABULARY, "batch 7")
    assert refused.value.what.startswith(what)
    assert refused.value.where == "batch 7, row 1, sample bad"
    assert sample_defect(sample(**changes), VOCABULARY) is not None
