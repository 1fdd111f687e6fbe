"""The comparison of trainer's and server's log-probs, on distributions with a known divergence."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from armature.components.contracts.batches import Sample
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import Failure
from armature.components.rl.agreement import LogprobAgreement, compare, refuse_mismatch, refuse_replay, step_mismatch
from armature.components.rl.settings import PreflightSettings
from tests.builders import make_sample
from tests.refusals import refused

TOKENS, VOCABULARY = 40_000, 50


IMAGE = ImageRef(sha256="0" * 64, media_type="image/png", width=1, height=1)


def sample_of(behavior: np.ndarray, images: tuple[ImageRef, ...] = ()) -> Sample:
    logprobs = np.concatenate([[0.0], behavior]).astype(np.float32)
    return make_sample(prompt=1, completion=len(behavior), behavior_logprobs=logprobs, images=images)


def drawn(server: np.ndarray, trainer: np.ndarray) -> tuple[list[Sample], list[np.ndarray]]:
    """Sample tokens from the distribution `server`.

    Return a sample that has the tokens' log-probs under `server`. Also return their log-probs under the distribution
    `trainer`.
    """
    tokens = np.random.default_rng(0).choice(VOCABULARY, TOKENS, p=server)
    scores = np.concatenate([[np.nan], np.log(trainer[tokens])])  # the score of a token that was not sampled is ignored
    return [sample_of(np.log(server[tokens]))], [scores]


def softmax(values: np.ndarray) -> np.ndarray:
    exponents = np.exp(values - values.max())
    return exponents / exponents.sum()


LOGITS = np.random.default_rng(1).normal(size=VOCABULARY)
POLICY = softmax(LOGITS)


def test_mismatch_kl_converges_to_kl_divergence():
    other = softmax(LOGITS + 0.3 * np.random.default_rng(2).normal(size=VOCABULARY))
    agreement = compare(*drawn(POLICY, other))
    assert agreement.tokens == TOKENS
    assert agreement.mismatch_kl == pytest.approx(float(np.sum(POLICY * np.log(POLICY / other))), rel=0.05)
    assert agreement.mean_ratio == pytest.approx(1.0, abs=0.02)


def test_equal_logprobs_pass():
    agreement = compare(*drawn(POLICY, POLICY))
    assert agreement.mismatch_kl < 1e-9
    refuse_mismatch(agreement, Counter(), 1e-3)


def test_mismatch_of_truncated_sampler_names_top_p():
    order = np.argsort(-POLICY)
    likeliest = order[: np.searchsorted(np.cumsum(POLICY[order]), 0.5) + 1]
    nucleus = np.zeros(VOCABULARY)
    nucleus[likeliest] = POLICY[likeliest] / POLICY[likeliest].sum()
    agreement = compare(*drawn(nucleus, POLICY))
    assert agreement.mean_ratio == pytest.approx(POLICY[likeliest].sum(), abs=0.01)
    with refused("logprobs_mismatch", "top_p"):
        refuse_mismatch(agreement, Counter(), 1e-3)


def test_mismatch_of_other_weights_names_model():
    other = softmax(np.random.default_rng(3).normal(size=VOCABULARY))
    with refused("logprobs_mismatch", "[model]"):
        refuse_mismatch(compare(*drawn(POLICY, other)), Counter(), 1e-3)


def test_no_samples_error_shows_drops():
    nothing = compare([], [])
    with refused("no_samples", "placeholder_mismatch 4", "preprocessor_config.json"):
        refuse_mismatch(nothing, Counter(placeholder_mismatch=4), 1e-3)
    failure = Failure("000000-0000-00", "000000-0000", "task", "reward_error", "ValueError (mine.py, line 3)")
    with refused("no_samples", "reward_error 1", failure.trajectory_id, failure.detail):
        refuse_mismatch(nothing, Counter(reward_error=1), 1e-3, [failure])
    with refused("no_samples"):
        refuse_mismatch(nothing, Counter(), 1e-3)


def test_nan_logprob_is_a_mismatch():
    samples, scores = drawn(POLICY, POLICY)
    scores[0][5] = np.nan
    with refused("logprobs_mismatch", "nan"):
        refuse_mismatch(compare(samples, scores), Counter(), 1e-3)


@pytest.mark.parametrize(
    ("text_error", "image_error", "shown", "hidden"),
    [
        (1e-4, 0.3, ["TRITON_ATTN"], "[model]"),  # only samples with images differ
        (0.3, 0.3, ["[model]"], "TRITON_ATTN"),
        (None, 0.3, ["[model]", "TRITON_ATTN"], "top_p"),  # without samples without images both reasons are likely
        (0.3, None, ["[model]"], "TRITON_ATTN"),
    ],
)
def test_mismatch_reason_depends_on_images(
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
        ({"mismatch_kl/first_update": 0.1, "mismatch_kl": 5.0}, False),  # later updates changed the policy
        ({"mismatch_kl/first_update": 0.101, "importance_ratio": 0.9}, True),
        ({"mismatch_kl/first_update": float("nan")}, True),
        ({"mismatch_kl/first_update": float("inf")}, True),
        ({"mismatch_kl/first_update": 0.5, "policy_version/min": 6.0}, True),  # sampled by the weights before step 7
        ({"mismatch_kl/first_update": 0.5, "policy_version/min": 5.0}, False),  # sampled by earlier weights
    ],
)
def test_step_mismatch_above_limit_is_an_error(metrics: dict[str, float], stops: bool) -> None:
    error = step_mismatch(metrics, 7, 0.1)
    assert (error is not None) == stops
    if error is not None:
        assert (error.code, error.where) == ("logprobs_mismatch", "preflight.max_step_mismatch_kl")


def test_stale_output_head_exceeds_default_limit() -> None:
    """A server with an outdated output head differed from the trainer by 1.6 to 2.8 nats per token."""
    other = softmax(LOGITS + 2.0 * np.random.default_rng(4).normal(size=VOCABULARY))
    kl = compare(*drawn(POLICY, other)).mismatch_kl
    bounds = PreflightSettings(groups=1, max_mismatch_kl=1e-3)
    assert step_mismatch({"mismatch_kl/first_update": kl}, 1, bounds.max_step_mismatch_kl) is not None
    assert bounds.step_mismatch == "stop"


def with_noise(size: float, seed: int = 3) -> LogprobAgreement:
    """Return the agreement of a trainer whose log-probs differ from the server's by normal noise."""
    samples, scores = drawn(POLICY, POLICY)
    return compare(samples, [scores[0] + size * np.random.default_rng(seed).normal(size=scores[0].shape)])


def test_replay_has_to_make_trainer_and_server_agree_better():
    refuse_replay(with_noise(0.01), with_noise(0.1))
    refuse_replay(with_noise(0.01), with_noise(0.01))  # no choice differed
    refuse_replay(with_noise(1e-6), with_noise(1e-6, seed=4))  # rounding
    for replayed, without in ((0.1, 0.01), (0.1, 1e-6)):
        with refused("replay_useless", "inference.replay_experts"):
            refuse_replay(with_noise(replayed), with_noise(without))
