"""A training step: its update and metrics, and the circumstances in which nothing may change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import DataError
from armature.components.models.adapters import model_inputs
from armature.components.training.engine import MOST_IN_A_ROW
from armature.components.vlm.learner import Learner
from tests.refusals import refused

from .conftest import LORA, Tiny, learner_of, score, step


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def on_policy(tiny: Tiny, learner: Learner, samples: list[Sample]) -> list[Sample]:
    """Return the samples with the trainer's log-probs in place of the sampler's."""
    pairs = zip(samples, score(learner, tiny, samples), strict=True)
    return [replace(sample, behavior_logprobs=logprobs) for sample, logprobs in pairs]


@pytest.mark.parametrize("aggregation", ["sum", "token", "sequence", "dr_grpo"])
def test_update_does_not_depend_on_micro_batches(tiny, aggregation):
    samples = tiny.samples(8, seed=0)
    results = []
    for max_tokens, max_rows in ((10_000, 8), (120, 3), (1, 1)):
        learner = learner_of(
            tiny,
            aggregation=aggregation,
            max_tokens_per_micro_batch=max_tokens,
            max_rows_per_micro_batch=max_rows,
            adam_epsilon=1e-3,
        )
        results.append((step(learner, tiny, samples), weights(learner)))
    for metrics, values in results[1:]:
        for name in ("loss", "grad_norm", "entropy", "importance_ratio", "masked_fraction", "ratio/p50"):
            assert metrics[name] == pytest.approx(results[0][0][name], rel=1e-4, abs=1e-6), name
        for name, value in values.items():
            torch.testing.assert_close(value, results[0][1][name], atol=1e-5, rtol=1e-4)


def with_advantages(samples: list[Sample]) -> list[Sample]:
    """Return the samples with advantages: each token gets its sample's reward minus the mean reward of all samples."""
    mean = np.mean([one.reward for one in samples])
    values = [np.where(one.loss_mask, one.reward - mean, 0).astype(np.float32) for one in samples]
    return [replace(one, advantages=value) for one, value in zip(samples, values, strict=True)]


def test_loss_equals_published_trainer(tiny):
    """The published loss is -sum of r (R - mean R) over the tokens within the band."""
    samples = with_advantages(tiny.samples(4, seed=2))
    objective = {"name": "mask_ratio", "mask_ratio_low": 0.8, "mask_ratio_high": 1.25}
    learner = learner_of(tiny, objective=objective, aggregation="sum")
    batch = tiny.collator.collate(samples, tiny.images.open)
    with torch.no_grad():
        logits = learner.model(**model_inputs(batch)).logits[:, :-1].double()
        logits[..., sorted(tiny.collator.forbidden_token_ids)] = float("-inf")
        lp = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    ratio = (lp - batch.behavior_logprobs[:, 1:].double()).exp()
    inside = batch.loss_mask[:, 1:] & (ratio >= 0.8) & (ratio <= 1.25)
    advantages = batch.rewards.double() - batch.rewards.double().mean()
    expected = -(ratio * advantages[:, None])[inside].sum().item()
    masked = 1 - inside.sum().item() / batch.loss_mask[:, 1:].sum().item()
    assert 0 < masked < 1
    metrics = step(learner, tiny, samples)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["masked_fraction"] == pytest.approx(masked)


def test_last_backward_pass_of_each_update_is_marked(tiny, monkeypatch):
    marks, backward = list[bool](), Learner.backward

    def recording(self: Learner, loss: torch.Tensor, last: bool = False) -> None:
        marks.append(last)
        backward(self, loss, last)

    monkeypatch.setattr(Learner, "backward", recording)
    step(learner_of(tiny, samples_per_update=3, max_rows_per_micro_batch=1), tiny, tiny.samples(6, seed=4))
    assert marks == [False, False, True] * 2


def test_first_update_mismatch_excludes_later_updates(tiny):
    learner = learner_of(tiny, samples_per_update=2, learning_rate=1e-2)
    metrics = step(learner, tiny, on_policy(tiny, learner, tiny.samples(6, seed=4)))
    assert metrics["mismatch_kl/first_update"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["mismatch_kl"] > 1e-5


@pytest.mark.parametrize("lora", [None, LORA], ids=["frozen copy", "adapters off"])
def test_kl_to_reference_starts_at_zero_and_grows(tiny, lora):
    learner = learner_of(tiny, tiny.model(lora=lora), kl_coefficient=0.1, learning_rate=1e-2)
    samples = tiny.samples(4, seed=5)
    first, second = step(learner, tiny, samples), step(learner, tiny, samples)
    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl_reference"] > 1e-6


def test_log_ratios_are_taken_at_start_of_their_update(tiny):
    samples = tiny.samples(8, seed=4)
    cut = {"max_tokens_per_micro_batch": 120, "max_rows_per_micro_batch": 3, "learning_rate": 1e-2}
    learner, first_half = learner_of(tiny, samples_per_update=4, **cut), learner_of(tiny, **cut)
    before = score(first_half, tiny, samples[:4])
    step(first_half, tiny, samples[:4])
    before += score(first_half, tiny, samples[4:])
    step(learner, tiny, samples)
    assert sorted(learner.log_ratios) == list(range(8))
    for row, (sample, scores) in enumerate(zip(samples, before, strict=True)):
        expected = (scores - sample.behavior_logprobs)[sample.loss_mask]
        np.testing.assert_allclose(learner.log_ratios[row], expected, atol=2e-5)


def test_later_updates_use_log_probs_of_step_start(tiny):
    """In the second update the correction's weights must still be computed with the first policy."""
    correction = {"level": "token", "mode": "truncate", "cap": 1e9}
    samples = tiny.samples(8, seed=6)
    learner = learner_of(tiny, correction=correction, samples_per_update=4, learning_rate=1e-2)
    pairs = zip(score(learner, tiny, samples), samples, strict=True)
    at_start = np.concatenate([logprobs[sample.loss_mask] for logprobs, sample in pairs])
    behavior = np.concatenate([sample.behavior_logprobs[sample.loss_mask] for sample in samples])
    metrics = step(learner, tiny, samples)
    assert metrics["updates"] == 2
    assert metrics["correction/mean_weight"] == pytest.approx(np.exp(at_start - behavior).mean(), rel=1e-5)
    assert metrics["importance_ratio"] != pytest.approx(np.exp(at_start - behavior).mean(), rel=1e-4)


def test_non_finite_gradient_skips_update(tiny):
    learner = learner_of(tiny)
    before = weights(learner)
    next(learner.model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    metrics = step(learner, tiny, tiny.samples(4, seed=7))
    assert metrics["updates_skipped"] == 1
    assert all(torch.equal(value, before[name]) for name, value in weights(learner).items())
    assert learner.steps_done == 1


def test_many_skipped_updates_in_a_row_end_training(tiny):
    learner = learner_of(tiny)
    first = next(learner.model.parameters())
    bad = first.register_hook(lambda gradient: gradient * float("inf"))
    for _ in range(MOST_IN_A_ROW - 1):
        step(learner, tiny, tiny.samples(2, seed=7))
    bad.remove()
    assert step(learner, tiny, tiny.samples(2, seed=7))["updates_skipped"] == 0
    first.register_hook(lambda gradient: gradient * float("nan"))
    for _ in range(MOST_IN_A_ROW - 1):
        step(learner, tiny, tiny.samples(2, seed=7))
    with refused("gradients_not_finite", MOST_IN_A_ROW):
        step(learner, tiny, tiny.samples(2, seed=7))


@pytest.mark.parametrize("shared", [0, 2], ids=["one update", "one update of three"])
def test_step_without_trained_token_changes_nothing(tiny, shared):
    """Weight decay and momentum must not move the weights either, although moments are not zero after a step."""
    learner = learner_of(tiny, samples_per_update=shared, weight_decay=0.1)
    step(learner, tiny, tiny.samples(4, seed=7))
    before, counts = weights(learner), [s["step"].item() for s in learner.optimizer.state.values()]
    untrained = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in tiny.samples(4, seed=8)]
    metrics = step(learner, tiny, untrained)
    assert [metrics[name] for name in ("loss", "grad_norm", "updates")] == [0.0] * 3
    assert not metrics.keys() & {"importance_ratio", "entropy", "mismatch_kl", "masked_fraction"}  # means of nothing
    assert metrics["sequences"] == 4 and metrics["tokens/trained"] == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(learner).items())
    assert [s["step"].item() for s in learner.optimizer.state.values()] == counts
    assert learner.steps_done == 2
    mixed = step(learner, tiny, [*untrained[:2], *tiny.samples(4, seed=9)])
    assert mixed["updates"] == (1 if shared == 0 else 2)
    assert mixed["loss"] != 0.0


def test_empty_batch_makes_step_without_update(tiny):
    learner = learner_of(tiny)
    before = weights(learner)
    metrics = step(learner, tiny, [])
    assert (metrics["updates"], metrics["sequences"]) == (0, 0)
    assert all(torch.equal(value, before[name]) for name, value in weights(learner).items())


def test_rejects_missing_log_probs(tiny):
    samples = tiny.samples(2, seed=0)
    samples[1].behavior_logprobs[-1] = np.nan
    with pytest.raises(DataError) as caught:
        step(learner_of(tiny), tiny, samples)
    assert caught.value.where.endswith("row 1, sample s1")


def test_bf16_model_is_trained_in_fp32(tiny):
    with refused("autocast_missing", "trainer.autocast"):
        learner_of(tiny, tiny.model(dtype="bfloat16", freeze=("vision",)))
    learner = learner_of(tiny, tiny.model(dtype="bfloat16", freeze=("vision",)), autocast="bf16", learning_rate=1e-6)
    before = weights(learner)
    metrics = step(learner, tiny, tiny.samples(4, seed=8))
    assert np.isfinite(metrics["loss"])
    for name, value in weights(learner).items():
        frozen = name.startswith("model.visual") and "merger" not in name
        assert value.dtype == (torch.bfloat16 if frozen else torch.float32)
        assert torch.equal(value, before[name]) == frozen, name


def test_training_raises_probability_of_good_tokens(tiny):
    """Tokens with a positive advantage become likelier, tokens with a negative advantage less likely."""
    learner = learner_of(tiny, learning_rate=3e-3, adam_epsilon=1e-8)
    samples = on_policy(tiny, learner, tiny.samples(6, seed=9))
    for _ in range(3):
        step(learner, tiny, samples)
    after = on_policy(tiny, learner, samples)
    change = [(b.behavior_logprobs - a.behavior_logprobs).sum() for a, b in zip(samples, after, strict=True)]
    signs = [sample.advantages.sum() for sample in samples]
    assert np.corrcoef(change, signs)[0, 1] > 0.5


def test_text_only_batches_are_trained(tiny):
    metrics = step(learner_of(tiny), tiny, tiny.samples(4, seed=0, n_images=(0,)))
    assert metrics["images"] == 0
    assert metrics["grad_norm"] > 0
