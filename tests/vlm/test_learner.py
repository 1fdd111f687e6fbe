"""A training step: the update it makes, and what must not change it."""

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
from armature.components.vlm.loader import MicroBatchLoader
from tests.refusals import refused

from .conftest import LORA, Tiny, learner_of, step


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def on_policy(tiny: Tiny, learner: Learner, samples: list[Sample]) -> list[Sample]:
    """The same samples with the trainer's own log-probs as the sampler's."""
    load = MicroBatchLoader(tiny.collator, tiny.images, 0)
    with load.batch():
        scores = learner.score(samples, load)
    return [replace(sample, behavior_logprobs=score) for sample, score in zip(samples, scores, strict=True)]


@pytest.mark.parametrize("aggregation", ["sum", "token", "sequence", "dr_grpo"])
def test_the_update_does_not_depend_on_how_micro_batches_are_cut(tiny, aggregation):
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
    """Each token's advantage is its sample's reward less the mean of all."""
    mean = np.mean([one.reward for one in samples])
    values = [np.where(one.loss_mask, one.reward - mean, 0).astype(np.float32) for one in samples]
    return [replace(one, advantages=value) for one, value in zip(samples, values, strict=True)]


def test_the_loss_is_that_of_the_published_trainer(tiny):
    """loss = -sum over kept tokens of r (R - mean R)."""
    samples = with_advantages(tiny.samples(4, seed=2))
    objective = {"name": "mask_ratio", "mask_ratio_low": 0.8, "mask_ratio_high": 1.25}
    learner = learner_of(tiny, objective=objective, aggregation="sum")
    batch = tiny.collator.collate(samples, tiny.images.open)
    with torch.no_grad():
        logits = learner.model(**model_inputs(batch)).logits[:, :-1].double()
        logits[..., sorted(tiny.collator.forbidden_token_ids)] = float("-inf")
        lp = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    ratio = (lp - batch.behavior_logprobs[:, 1:].double()).exp()
    kept = batch.loss_mask[:, 1:] & (ratio >= 0.8) & (ratio <= 1.25)
    advantages = batch.rewards.double() - batch.rewards.double().mean()
    expected = -(ratio * advantages[:, None])[kept].sum().item()
    masked = 1 - kept.sum().item() / batch.loss_mask[:, 1:].sum().item()
    assert 0 < masked < 1
    metrics = step(learner, tiny, samples)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["masked_fraction"] == pytest.approx(masked)


def test_the_last_backward_pass_of_each_update_is_announced(tiny, monkeypatch):
    announced, backward = list[bool](), Learner.backward

    def recording(self: Learner, loss: torch.Tensor, last: bool = False) -> None:
        announced.append(last)
        backward(self, loss, last)

    monkeypatch.setattr(Learner, "backward", recording)
    step(learner_of(tiny, samples_per_update=3, max_rows_per_micro_batch=1), tiny, tiny.samples(6, seed=4))
    assert announced == [False, False, True] * 2


def test_the_first_update_tells_the_engines_apart_from_what_later_updates_have_changed(tiny):
    learner = learner_of(tiny, samples_per_update=2, learning_rate=1e-2)
    metrics = step(learner, tiny, on_policy(tiny, learner, tiny.samples(6, seed=4)))
    assert metrics["mismatch_kl/first_update"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["mismatch_kl"] > 1e-5


@pytest.mark.parametrize("lora", [None, LORA], ids=["frozen copy", "adapters off"])
def test_the_kl_to_the_reference_begins_at_zero_and_grows(tiny, lora):
    learner = learner_of(tiny, tiny.model(lora=lora), kl_coefficient=0.1, learning_rate=1e-2)
    samples = tiny.samples(4, seed=5)
    first, second = step(learner, tiny, samples), step(learner, tiny, samples)
    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl_reference"] > 1e-6


def test_the_ratios_of_all_tokens_are_those_of_the_weights_that_their_update_began_with(tiny):
    samples = tiny.samples(8, seed=4)
    cut = {"max_tokens_per_micro_batch": 120, "max_rows_per_micro_batch": 3, "learning_rate": 1e-2}
    learner, first_half = learner_of(tiny, samples_per_update=4, **cut), learner_of(tiny, **cut)
    load = MicroBatchLoader(tiny.collator, tiny.images, 0)
    with load.batch():
        before = first_half.score(samples[:4], load)
    step(first_half, tiny, samples[:4])
    with load.batch():
        before += first_half.score(samples[4:], load)
    step(learner, tiny, samples)
    assert sorted(learner.log_ratios) == list(range(8))
    for row, (sample, scores) in enumerate(zip(samples, before, strict=True)):
        expected = (scores - sample.behavior_logprobs)[sample.loss_mask]
        np.testing.assert_allclose(learner.log_ratios[row], expected, atol=2e-5)


def test_several_updates_use_the_log_probs_of_the_start(tiny):
    """In the second update the correction's weights must still be those of the first policy."""
    correction = {"level": "token", "mode": "truncate", "cap": 1e9}
    samples = tiny.samples(8, seed=6)
    learner = learner_of(tiny, correction=correction, samples_per_update=4, learning_rate=1e-2)
    load = MicroBatchLoader(tiny.collator, tiny.images, 0)
    with load.batch():
        at_start = np.concatenate(
            [s[sample.loss_mask] for s, sample in zip(learner.score(samples, load), samples, strict=True)]
        )
    behavior = np.concatenate([sample.behavior_logprobs[sample.loss_mask] for sample in samples])
    metrics = step(learner, tiny, samples)
    assert metrics["updates"] == 2
    assert metrics["correction/mean_weight"] == pytest.approx(np.exp(at_start - behavior).mean(), rel=1e-5)
    assert metrics["importance_ratio"] != pytest.approx(np.exp(at_start - behavior).mean(), rel=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(tiny):
    learner = learner_of(tiny)
    before = weights(learner)
    next(learner.model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    metrics = step(learner, tiny, tiny.samples(4, seed=7))
    assert metrics["updates_skipped"] == 1
    assert all(torch.equal(value, before[name]) for name, value in weights(learner).items())
    assert learner.steps_done == 1


def test_many_gradients_in_a_row_that_are_not_finite_end_the_training(tiny):
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
def test_a_step_without_a_trained_token_changes_nothing(tiny, shared):
    """Of AdamW's own, that is: after a step that has moved the moments, decay and momentum would go on."""
    learner = learner_of(tiny, samples_per_update=shared, weight_decay=0.1)
    step(learner, tiny, tiny.samples(4, seed=7))
    before, counts = weights(learner), [s["step"].item() for s in learner.optimizer.state.values()]
    untrained = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in tiny.samples(4, seed=8)]
    metrics = step(learner, tiny, untrained)
    assert [metrics[name] for name in ("loss", "importance_ratio", "entropy", "grad_norm", "updates")] == [0.0] * 5
    assert metrics["sequences"] == 4 and metrics["tokens/trained"] == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(learner).items())
    assert [s["step"].item() for s in learner.optimizer.state.values()] == counts
    assert learner.steps_done == 2
    mixed = step(learner, tiny, [*untrained[:2], *tiny.samples(4, seed=9)])
    assert mixed["updates"] == (1 if shared == 0 else 2)
    assert mixed["loss"] != 0.0


def test_a_batch_without_signal_is_a_step_without_an_update(tiny):
    learner = learner_of(tiny)
    before = weights(learner)
    metrics = step(learner, tiny, [])
    assert (metrics["updates"], metrics["sequences"]) == (0, 0)
    assert all(torch.equal(value, before[name]) for name, value in weights(learner).items())


def test_log_probs_that_are_missing_are_refused(tiny):
    samples = tiny.samples(2, seed=0)
    samples[1].behavior_logprobs[-1] = np.nan
    with pytest.raises(DataError) as caught:
        step(learner_of(tiny), tiny, samples)
    assert caught.value.where.endswith("row 1, sample s1")


def test_bf16_weights_are_trained_in_fp32(tiny):
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


def test_it_learns(tiny):
    """Tokens with a positive advantage become likelier, those with a negative one less so."""
    learner = learner_of(tiny, learning_rate=3e-3, adam_epsilon=1e-8)
    samples = on_policy(tiny, learner, tiny.samples(6, seed=9))
    for _ in range(3):
        step(learner, tiny, samples)
    after = on_policy(tiny, learner, samples)
    change = [(b.behavior_logprobs - a.behavior_logprobs).sum() for a, b in zip(samples, after, strict=True)]
    signs = [sample.advantages.sum() for sample in samples]
    assert np.corrcoef(change, signs)[0, 1] > 0.5


def test_text_only_batches_train_too(tiny):
    metrics = step(learner_of(tiny), tiny, tiny.samples(4, seed=0, n_images=(0,)))
    assert metrics["images"] == 0
    assert metrics["grad_norm"] > 0
