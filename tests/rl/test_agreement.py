"""The pre-flight comparison, on distributions whose divergence is known."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from armature.components.contracts.batches import Sample
from armature.components.contracts.images import ImageRef
from armature.components.rl.agreement import compare, refuse_mismatch, step_mismatch
from armature.components.rl.settings import PreflightSettings
from tests.refusals import refused

TOKENS, VOCABULARY = 40_000, 50


IMAGE = ImageRef(sha256="0" * 64, media_type="image/png", width=1, height=1)


def sample_of(behavior: np.ndarray, images: tuple[ImageRef, ...] = ()) -> Sample:
    length = len(behavior) + 1
    mask = np.ones(length, dtype=np.bool_)
    mask[0] = False
    return Sample(
        sample_id="s",
        group_id="g",
        trajectory_id="t",
        input_ids=np.zeros(length, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.concatenate([[0.0], behavior]).astype(np.float32),
        policy_versions=np.zeros(length, dtype=np.int32),
        advantages=np.zeros(length, dtype=np.float32),
        reward=0.0,
        images=images,
    )


def drawn(server: np.ndarray, trainer: np.ndarray) -> tuple[list[Sample], list[np.ndarray]]:
    """Tokens sampled from `server`, their log-probs there, and those under `trainer`."""
    tokens = np.random.default_rng(0).choice(VOCABULARY, TOKENS, p=server)
    scores = np.concatenate([[np.nan], np.log(trainer[tokens])])  # what is not sampled is not looked at
    return [sample_of(np.log(server[tokens]))], [scores]


def softmax(values: np.ndarray) -> np.ndarray:
    exponents = np.exp(values - values.max())
    return exponents / exponents.sum()


LOGITS = np.random.default_rng(1).normal(size=VOCABULARY)
POLICY = softmax(LOGITS)


def test_the_estimate_converges_to_the_kl_divergence():
    other = softmax(LOGITS + 0.3 * np.random.default_rng(2).normal(size=VOCABULARY))
    found = compare(*drawn(POLICY, other))
    assert found.tokens == TOKENS
    assert found.mismatch_kl == pytest.approx(float(np.sum(POLICY * np.log(POLICY / other))), rel=0.05)
    assert found.mean_ratio == pytest.approx(1.0, abs=0.02)


def test_equal_sides_pass():
    agreement = compare(*drawn(POLICY, POLICY))
    assert agreement.mismatch_kl < 1e-9
    refuse_mismatch(agreement, Counter(), 1e-3)


def test_a_truncated_sampler_is_named():
    order = np.argsort(-POLICY)
    kept = order[: np.searchsorted(np.cumsum(POLICY[order]), 0.5) + 1]
    nucleus = np.zeros(VOCABULARY)
    nucleus[kept] = POLICY[kept] / POLICY[kept].sum()
    agreement = compare(*drawn(nucleus, POLICY))
    assert agreement.mean_ratio == pytest.approx(POLICY[kept].sum(), abs=0.01)
    with refused("logprobs_mismatch", "top_p"):
        refuse_mismatch(agreement, Counter(), 1e-3)


def test_other_weights_are_named():
    other = softmax(np.random.default_rng(3).normal(size=VOCABULARY))
    with refused("logprobs_mismatch", "[model]"):
        refuse_mismatch(compare(*drawn(POLICY, other)), Counter(), 1e-3)


def test_nothing_to_compare_names_the_drops():
    nothing = compare([], [])
    with refused("no_samples", "placeholder_mismatch 4", "preprocessor_config.json"):
        refuse_mismatch(nothing, Counter(placeholder_mismatch=4), 1e-3)
    with refused("no_samples"):
        refuse_mismatch(nothing, Counter(), 1e-3)


def test_a_nan_is_never_an_agreement():
    samples, scores = drawn(POLICY, POLICY)
    scores[0][5] = np.nan
    with refused("logprobs_mismatch", "nan"):
        refuse_mismatch(compare(samples, scores), Counter(), 1e-3)


@pytest.mark.parametrize(
    ("text_error", "image_error", "shown", "hidden"),
    [
        (1e-4, 0.3, ["TRITON_ATTN"], "[model]"),  # only what has images differs
        (0.3, 0.3, ["[model]"], "TRITON_ATTN"),
        (None, 0.3, ["[model]", "TRITON_ATTN"], "top_p"),  # nothing without images to tell the two apart
        (0.3, None, ["[model]"], "TRITON_ATTN"),
    ],
)
def test_a_mismatch_on_images_alone_is_put_down_to_them(
    text_error: float | None, image_error: float | None, shown: list[str], hidden: str
):
    samples, scores = [], []
    for error, images in ((text_error, ()), (image_error, (IMAGE,))):
        if error is not None:
            drawn_samples, drawn_scores = drawn(POLICY, POLICY)
            noise = error * np.random.default_rng(3).normal(size=drawn_scores[0].shape)
            samples.append(sample_of(drawn_samples[0].behavior_logprobs[1:], images))
            scores.append(drawn_scores[0] + noise)
    with refused("logprobs_mismatch", *shown) as error:
        refuse_mismatch(compare(samples, scores), Counter(), 1e-3)
    assert hidden not in error.value.remedy


@pytest.mark.parametrize(
    ("metrics", "stops"),
    [
        ({}, False),  # no token was trained
        ({"mismatch_kl/first_update": 0.1, "mismatch_kl": 5.0}, False),  # later updates moved the policy
        ({"mismatch_kl/first_update": 0.101, "importance_ratio": 0.9}, True),
        ({"mismatch_kl/first_update": float("nan")}, True),
        ({"mismatch_kl/first_update": float("inf")}, True),
        ({"mismatch_kl/first_update": 0.5, "policy_version/min": 6.0}, True),  # of the weights before step 7
        ({"mismatch_kl/first_update": 0.5, "policy_version/min": 5.0}, False),  # of earlier ones: the policy has moved
    ],
)
def test_a_step_stops_above_its_bound(metrics: dict[str, float], stops: bool) -> None:
    error = step_mismatch(metrics, 7, 0.1)
    assert (error is not None) == stops
    if error is not None:
        assert (error.code, error.where) == ("logprobs_mismatch", "preflight.max_step_mismatch_kl")


def test_an_old_head_is_far_above_the_default_bound() -> None:
    """The engines were 1.6 to 2.8 nats apart, token by token, when a server kept the old output head."""
    other = softmax(LOGITS + 2.0 * np.random.default_rng(4).normal(size=VOCABULARY))
    kl = compare(*drawn(POLICY, other)).mismatch_kl
    bounds = PreflightSettings(groups=1, max_mismatch_kl=1e-3)
    assert step_mismatch({"mismatch_kl/first_update": kl}, 1, bounds.max_step_mismatch_kl) is not None
    assert bounds.step_mismatch == "stop"
