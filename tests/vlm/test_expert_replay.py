"""Replay of a server's experts: the trainer's router weighs the experts that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from armature.components.contracts.batches import Sample
from armature.components.models.adapters import model_inputs
from armature.components.models.adapters.sequences import sample_of
from armature.components.models.experts import RouterHooks, routers
from armature.components.rl.agreement import LogprobAgreement, compare, refuse_replay
from armature.components.rollouts.batches.table import read_batch, sample_defect, write_batch
from armature.components.vlm.logprobs import Policy, predicting
from tests.builders import make_trajectory, make_turn
from tests.refusals import refused

from .conftest import LORA, Tiny, assert_same_step, learner_of, model_settings, score, step, stepped
from .test_packing import assert_rows_are_separate, conversations

LAYERS, EXPERTS, CHOSEN = 2, 8, 2


@pytest.fixture(params=["qwen3-vl-moe"])
def tiny(request, make_tiny) -> Tiny:
    return make_tiny(request.param)


def with_experts(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with random experts, equal for tokens with equal beginnings, as a prefix cache gives them."""
    changed = []
    for sample in samples:
        experts = np.full((len(sample.input_ids), LAYERS, CHOSEN), -1, dtype=np.int16)
        images = [int(ref.sha256[:8], 16) for ref in sample.images[:1]]
        for end, row in enumerate(experts[:-1], 1):
            random = np.random.default_rng([*images, *sample.input_ids[:end].tolist()])
            row[:] = [random.choice(EXPERTS, CHOSEN, replace=False) for _ in range(LAYERS)]
        changed.append(replace(sample, experts=experts))
    return changed


def own_experts(tiny: Tiny, samples: Sequence[Sample], model: Any = None) -> list[Sample]:
    """Return the samples with the experts that the model chooses itself."""
    changed = []
    policy = Policy(deepcopy(model) or tiny.model(), logprobs="torch", temperature=1.0)
    chosen: list[torch.Tensor] = []
    for router in routers(policy.model).values():
        router.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
    for sample in samples:
        batch = tiny.collator.collate([sample], tiny.images.open)
        with torch.no_grad():
            policy(model_inputs(batch), predicting(batch.loss_mask))
        changed.append(replace(sample, experts=torch.stack(chosen, 1).to(torch.int16).numpy()))
        chosen.clear()
    return changed


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_replay_of_own_choices_has_the_same_bits(packing, tiny):
    samples = conversations(tiny)
    plain, replayed = (
        stepped(learner_of(tiny, packing=packing, max_rows_per_micro_batch=1), tiny, each)
        for each in (samples, own_experts(tiny, samples))
    )
    assert "experts/other_fraction" not in plain.metrics
    assert replayed.metrics["experts/other_fraction"] == 0
    assert all(np.array_equal(value, replayed.log_ratios[row]) for row, value in plain.log_ratios.items())
    assert packing or all(torch.equal(value, replayed.weights[name]) for name, value in plain.weights.items())


def test_forced_experts_equal_layer_computed_by_hand(tiny):
    block = tiny.model().model.language_model.layers[1].mlp
    block.gate.weight.requires_grad_(True)
    replay = RouterHooks(torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"1": block})}))
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, 64, generator=random)
    forced = torch.rand(5, LAYERS, EXPERTS, generator=random).argsort(-1)[..., :CHOSEN].to(torch.int16)
    forced[4] = -1
    replay.use(forced)
    results = []
    probabilities = (x[0] @ block.gate.weight.T).softmax(-1)
    rows = []
    for token, experts in enumerate([*forced[:4, 1].tolist(), probabilities[4].topk(CHOSEN).indices.tolist()]):
        weights = probabilities[token, experts] / probabilities[token, experts].sum()
        row = torch.zeros(64)
        for weight, expert in zip(weights, experts, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ x[0, token]).chunk(2)
            row = row + weight * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    for result in (block(x)[0], torch.stack(rows)):
        gradient = torch.autograd.grad((result * torch.linspace(-1, 1, 64)).sum(), block.gate.weight)[0]
        results += [result, gradient]
    assert results[1].abs().max() > 1e-3
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(results[1], results[3], rtol=1e-5, atol=1e-7)
    counts = replay.take_counts()
    assert counts["experts_other"] > 0 and counts["experts_compared"] == 4


def test_sigmoid_router_weighs_forced_experts_by_its_formula(make_tiny):
    """In GLM's layer a bias and groups of experts are for the choice alone."""
    block = make_tiny("glm4v-moe").model().model.language_model.layers[1].mlp
    router = block.gate
    router.weight.requires_grad_(True)
    router.routed_scaling_factor = 2.5
    assert router.num_group == 2 and router.e_score_correction_bias.abs().max() > 0
    replay = RouterHooks(torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"1": block})}))
    random = torch.Generator().manual_seed(0)
    x = torch.randn(6, 64, generator=random)
    forced = torch.rand(6, LAYERS, EXPERTS, generator=random).argsort(-1)[..., :CHOSEN].to(torch.int16)
    assert (forced[:, 1, 0] // 4 != forced[:, 1, 1] // 4).any()  # of both groups
    scores = (x @ router.weight.T).sigmoid().gather(-1, forced[:, 1].long())
    by_hand = 2.5 * scores / scores.sum(-1, keepdim=True)
    replay.use(forced)
    _, weights, experts = router(x)
    assert torch.equal(experts, forced[:, 1].long())
    gradients = [
        torch.autograd.grad((one * torch.tensor([1.0, -2.0])).sum(), router.weight)[0] for one in (weights, by_hand)
    ]
    torch.testing.assert_close(weights, by_hand)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0
    replay.use(None)
    _, own, chosen = router(x)
    replay.use(torch.stack([chosen, chosen], 1))
    assert torch.equal(router(x)[1], own)


@pytest.mark.parametrize("tiny", ["qwen3-vl-moe", "qwen3.5-moe", "glm4v-moe"], indirect=True)
def test_packed_rows_with_replayed_experts_equal_separate_rows(tiny, tmp_path):
    samples = with_experts(conversations(tiny))
    assert_rows_are_separate(tiny, tiny.model(), samples, tmp_path)
    other = samples[3].experts.copy()
    other[2:-1] = (other[2:-1] + 1) % EXPERTS
    different = [*samples, replace(samples[3], experts=other)]  # equal tokens, other experts from the third on
    assert_rows_are_separate(tiny, tiny.model(), different, tmp_path)


def test_recomputed_layers_use_replayed_experts(tiny):
    samples, done = with_experts(conversations(tiny)), []
    for recomputed in (False, True):
        learner = learner_of(tiny, tiny.model(gradient_checkpointing=recomputed), packing=True)
        done.append(stepped(learner, tiny, samples))
    assert_same_step(*done)
    assert done[0].metrics["experts/other_fraction"] > 0.5
    plain = step(learner_of(tiny, packing=True), tiny, conversations(tiny))
    assert plain["grad_norm"] != pytest.approx(done[0].metrics["grad_norm"], rel=1e-3)


def test_sample_of_two_turns_has_experts_of_the_turn_that_computed_a_token(tmp_path):
    def experts(tokens: int, value: int) -> Any:
        return np.full((tokens, LAYERS, CHOSEN), value, np.uint8)

    first = make_turn(completion_token_ids=[7, 8], completion_logprobs=[-1, -1], experts=experts(3, 200))
    second = make_turn(index=1, prompt_token_ids=[5, 6, 7, 8, 9], experts=experts(5, 4))
    sample = sample_of(make_trajectory("t", "g", [first, second]), [first, second])
    assert sample.experts is not None
    assert sample.experts[:, 1, 0].tolist() == [200, 200, 200, 4, 4, -1]
    without = sample_of(make_trajectory("t", "g", [first]), [replace(first, experts=None)])
    write_batch(tmp_path, [sample, without])
    one, other = read_batch(tmp_path)
    assert np.array_equal(one.experts, sample.experts) and one.experts.dtype == np.int16
    assert other.experts is None
    assert sample_defect(sample) is None
    assert sample_defect(replace(sample, experts=sample.experts[:-1]))[0] == "experts"


def test_replay_lowers_mismatch_with_sampler_in_bf16_and_wrong_experts_are_refused(make_tiny):
    """The sampler and the trainer have equal weights, with gates in pairs of nearly equal rows."""
    tiny = make_tiny("qwen3-vl-moe", initializer_range=0.15)
    samples = conversations(tiny)
    sampler, trainer = tiny.model(dtype="bfloat16"), tiny.model()
    with torch.no_grad():
        for router in routers(sampler).values():
            noise = 1e-3 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
            router.weight[4:] = router.weight[:4] + noise.bfloat16()
        trainer.load_state_dict(sampler.state_dict())
    used = own_experts(tiny, samples, sampler)
    scores = score(learner_of(tiny, sampler, weights="bfloat16"), tiny, used)
    used = [replace(sample, behavior_logprobs=values) for sample, values in zip(used, scores, strict=True)]
    learner = learner_of(tiny, trainer, packing=True)

    def agreement(samples: list[Sample]) -> LogprobAgreement:
        return compare(samples, score(learner, tiny, samples))

    replayed, without = agreement(used), agreement([replace(sample, experts=None) for sample in used])
    assert replayed.mismatch_kl < without.mismatch_kl / 5
    refuse_replay(replayed, without)
    wrong = [replace(sample, experts=((sample.experts + 1) % EXPERTS).astype(np.int16)) for sample in used]
    with refused("replay_useless", "inference.replay_experts"):
        refuse_replay(agreement(wrong), without)
    shifted = [replace(sample, experts=np.roll(sample.experts, 1, 0)) for sample in used]
    with refused("replay_useless", "inference.replay_experts"):
        refuse_replay(agreement(shifted), without)


def test_load_balance_loss_equals_formula_without_padding(tiny):
    """Mean over layers of E * sum over experts of (share of tokens that use it) * (mean probability)."""
    model = tiny.model(train_routers=True)
    logits: list[torch.Tensor] = []
    for router in routers(model).values():
        router.register_forward_hook(lambda module, inputs, output: logits.append(output[0].detach()))
    policy = Policy(model, logprobs="torch", temperature=1.0)
    policy.routers.collects = True
    batch = tiny.collator.collate(conversations(tiny), tiny.images.open)
    policy(model_inputs(batch), predicting(batch.loss_mask))
    loss = policy.routers.balance_loss()
    real = batch.attention_mask.flatten().bool()
    assert not real.all()
    expected, shares = [], []
    for each in logits:
        probabilities = each[real].softmax(-1).double()
        used = torch.zeros_like(probabilities)
        for row, values in zip(used, probabilities, strict=True):
            row[values.argsort()[-CHOSEN:]] = 1
        expected.append(EXPERTS * float((used.mean(0) * probabilities.mean(0)).sum()))
        shares += used.mean(0).tolist()
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-5)
    counts = policy.routers.take_counts()
    assert counts["experts/busiest"] == pytest.approx(max(shares))
    assert counts["experts/unused_fraction"] == pytest.approx(np.mean(np.array(shares) == 0))
    loss.backward()
    assert all(router.weight.grad.abs().max() > 0 for router in routers(model).values())


def test_load_balance_loss_spreads_tokens_over_experts(tiny):
    samples = [replace(sample, advantages=np.zeros_like(sample.advantages)) for sample in conversations(tiny)]
    model = tiny.model(train_routers=True, gradient_checkpointing=True)
    learner = learner_of(tiny, model, load_balance_coefficient=1.0, learning_rate=1e-3, max_steps=20, packing=True)
    busiest = [step(learner, tiny, samples)["experts/busiest"] for _ in range(20)]
    assert busiest[-1] < 0.9 * busiest[0]


def test_load_balance_needs_trained_routers(tiny, make_tiny):
    with refused("routers_frozen", "model.train_routers"):
        learner_of(tiny, load_balance_coefficient=0.1)
    with refused("experts_missing", "model.train_routers"):
        make_tiny("qwen2-vl").model(train_routers=True)
    for wrong in ({"lora": LORA}, {"freeze": ("language",)}):
        with refused("value_error", "train_routers"):
            model_settings(train_routers=True, **wrong)
