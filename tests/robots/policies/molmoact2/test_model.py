"""The model, compared with formulas in float64 and with transformers' Molmo2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Molmo2ForConditionalGeneration

from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.model import LossDenominators
from armature.components.robots.policies.molmoact2.modeling.losses import LossPlan
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2, Precision
from armature.components.robots.policies.molmoact2.modeling.vlm import VisionMLP, normalized
from armature.components.robots.policies.molmoact2.processing.batch import PolicyBatch
from tests.refusals import refused
from tests.robots.policies.molmoact2 import reference
from tests.robots.policies.molmoact2.examples import CONFIG, as_batch, make_draws, make_examples, make_model, make_plan

HEADS = CONFIG.action_expert_config.num_heads


def _native(model: MolmoAct2) -> Molmo2ForConditionalGeneration:
    state = model.vlm.state_dict()
    embedding = "model.language_model.embed_tokens."
    state[f"{embedding}weight"] = torch.cat(
        [state.pop(f"{embedding}embedding"), state.pop(f"{embedding}new_embedding")]
    )
    native = Molmo2ForConditionalGeneration(CONFIG.molmo2())
    native.load_state_dict(state)
    return native.eval()


@pytest.mark.parametrize("bidirectional", [False, True])
def test_states_keys_and_values_equal_transformers_molmo2(bidirectional: bool) -> None:
    model, batch = make_model().eval(), as_batch(make_examples(2), side="right")
    hidden = model.encode(batch, bidirectional)
    native = _native(model)
    with torch.no_grad():
        actual = native.model(
            input_ids=batch.input_ids,
            attention_mask=(batch.example_ids >= 0).long(),
            position_ids=batch.position_ids,
            mm_token_type_ids=batch.image_tokens.long() * bidirectional,
            pixel_values=normalized(batch.pixel_values),
            image_token_pooling=batch.pooling,
            image_grids=torch.tensor([[2, 2, 0, 0]] * len(batch.pixel_values)),
            use_cache=True,
        )
    real = batch.example_ids >= 0
    torch.testing.assert_close(hidden.states[real], actual.last_hidden_state[real], rtol=0, atol=1e-5)
    for (keys, values), layer in zip(hidden.cache, actual.past_key_values.layers, strict=True):
        for ours, theirs in ((keys, layer.keys), (values, layer.values)):
            torch.testing.assert_close(ours.transpose(1, 2)[real], theirs.transpose(1, 2)[real], rtol=0, atol=1e-5)
    alone = model.encode(batch, bidirectional, cache_only=True)
    assert alone.states.numel() == 0
    for whole, part in zip(hidden.cache, alone.cache, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(whole, part, strict=True))


def test_pixels_are_rounded_to_8_bits() -> None:
    """The released code rounds pixels in [-1, 1] back to 8 bits in the same way."""
    levels = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(normalized(levels).double(), torch.arange(256).double() / 255 * 2 - 1, rtol=0, atol=1e-6)
    assert torch.equal(((normalized(levels) + 1) / 2 * 255).round(), levels.float())


def _reference_loss(
    model: MolmoAct2, batch: PolicyBatch, draws: FlowSamples, visible: list[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each example's flow loss in float64, and the expert's weights with gradients to it."""
    weights = {name: value.detach().double().requires_grad_() for name, value in model.action_expert.named_parameters()}
    cache = [
        tuple(part.detach().double() for part in layer)
        for layer in model.encode(batch, bidirectional_images=False).cache
    ]
    losses = [
        reference.flow_loss(
            weights,
            batch.actions[index].double(),
            draws.noise[index].double(),
            draws.times[index].double(),
            [(keys[row], values[row]) for keys, values in cache],
            visible[index],
            ~batch.horizon_padding[index],
            ~batch.dimension_padding[index],
            HEADS,
        )
        for index, row in enumerate(batch.rows.tolist())
    ]
    return torch.stack(losses), weights


@pytest.mark.parametrize("valid_steps", [5, 3])
def test_flow_loss_and_gradients_equal_the_reference(valid_steps: int) -> None:
    model, batch = make_model(), as_batch(make_examples(2, valid_steps=valid_steps), extra=2)
    draws = make_draws(2, draws=2)
    visible = [row >= 0 for row in batch.example_ids]
    losses, weights = _reference_loss(model, batch, draws, visible)
    expected = dict(zip(weights, torch.autograd.grad(losses.mean(), list(weights.values())), strict=True))

    actual = model(batch, draws, make_plan())
    actual.total.backward()

    torch.testing.assert_close(actual.flow_per_example.double(), losses, rtol=1e-5, atol=1e-5)
    for name, parameter in model.action_expert.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_expert_does_not_attend_to_discrete_actions_and_eos() -> None:
    model, batch = make_model(), as_batch(make_examples(2, answer=True))
    draws = make_draws(2, draws=1)
    visible = []
    for ids, owner in zip(batch.input_ids, batch.example_ids, strict=True):
        start = ids.tolist().index(CONFIG.action_start_token_id)
        visible.append((owner >= 0) & (ids != CONFIG.eos_token_id) & (torch.arange(len(ids)) < start))
    losses, _ = _reference_loss(model, batch, draws, visible)
    actual = model(batch, draws, make_plan(action_mode="both", hides_answers=True))
    torch.testing.assert_close(actual.flow_per_example.double(), losses, rtol=1e-5, atol=1e-5)


def test_discrete_losses_equal_the_reference() -> None:
    model, batch = make_model(), as_batch(make_examples(3, answer=True))
    actual = model(batch, None, make_plan(action_mode="discrete", z_scale=0.01))
    states = model.encode(batch, bidirectional_images=False).states.double()
    rows, columns = (batch.labels != -100).nonzero(as_tuple=True)
    logits = states[rows, columns - 1] @ model.vlm.lm_head.weight.double().T
    expected = reference.discrete_loss(logits, batch.labels[rows, columns], batch.example_ids[rows, columns], 0.01)
    torch.testing.assert_close(actual.cross_entropy.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.z.double(), expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.cross_entropy_per_example.mean(), actual.cross_entropy, rtol=1e-5, atol=0)


def _gradients(model: MolmoAct2, *arguments: Any, **named: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(*arguments, **named).total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _permuted(draws: FlowSamples, order: list[int]) -> FlowSamples:
    return FlowSamples(draws.times[order], draws.noise[order])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_rows_have_losses_and_gradients_of_separate_rows(bidirectional: bool) -> None:
    model, examples = make_model(), make_examples(4, answer=True)
    plan = make_plan(action_mode="both", hides_answers=True, bidirectional_images=bidirectional)
    draws, rows = make_draws(4), [[2, 0, 3], [1]]
    order = [index for row in rows for index in row]
    packed, separate = as_batch(examples, rows, side="right", extra=3), as_batch(examples)

    together, alone = model(packed, _permuted(draws, order), plan), model(separate, draws, plan)

    assert float(together.total.detach()) == pytest.approx(float(alone.total.detach()), rel=1e-6)
    for part in ("flow_per_example", "cross_entropy_per_example", "z_per_example"):
        torch.testing.assert_close(getattr(together, part), getattr(alone, part)[order], rtol=0, atol=1e-5)
    expected = _gradients(model, separate, draws, plan)
    for name, gradient in _gradients(model, packed, _permuted(draws, order), plan).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_mixed_horizons_have_losses_and_gradients_of_separate_batches() -> None:
    model = make_model()
    short, long = make_examples(2, seed=1, valid_steps=2), make_examples(2, seed=2)
    draws, plan, four = make_draws(4), make_plan(), LossDenominators(4, 0)
    mixed = model(as_batch([*short, *long]), draws, plan)
    expected = _gradients(model, as_batch([*short, *long]), draws, plan)
    parts = [(short, [0, 1]), (long, [2, 3])]
    alone = [model(as_batch(part), _permuted(draws, which), plan) for part, which in parts]
    torch.testing.assert_close(
        mixed.flow_per_example, torch.cat([one.flow_per_example for one in alone]), rtol=0, atol=1e-5
    )
    sums = [_gradients(model, as_batch(part), _permuted(draws, which), plan, four) for part, which in parts]
    for name, gradient in expected.items():
        torch.testing.assert_close(sums[0][name] + sums[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_losses_of_micro_batches_add_up_to_the_update() -> None:
    model, examples, draws = make_model(), make_examples(3, answer=True), make_draws(3)
    plan = make_plan(action_mode="both")
    whole = model(as_batch(examples), draws, plan)
    parts = [(as_batch(examples[:1]), _permuted(draws, [0])), (as_batch(examples[1:]), _permuted(draws, [1, 2]))]
    all_of_it = LossDenominators(*map(sum, zip(*(model.denominators(part[0], plan) for part in parts), strict=True)))
    total = sum(model(batch, some, plan, all_of_it).total for batch, some in parts)
    torch.testing.assert_close(total, whole.total, rtol=1e-5, atol=1e-5)


def test_knowledge_insulation_stops_gradients_to_the_vlm() -> None:
    model, batch, draws = make_model(), as_batch(make_examples(2)), make_draws(2)
    open_, closed = (_gradients(model, batch, draws, make_plan(knowledge_insulation=value)) for value in (False, True))
    assert any(name.startswith("vlm.") for name in open_)
    assert not any(name.startswith("vlm.") for name in closed)
    assert all(torch.equal(closed[name], open_[name]) for name in closed)


@pytest.mark.parametrize("features", [[3, 1], [3, 0]], ids=["pairs of vision layers", "some alone"])
def test_activation_checkpointing_is_bitwise_equal(features: list[int]) -> None:
    model, batch, draws = (
        make_model(residual_dropout=0.1).train(),
        as_batch(make_examples(2, answer=True)),
        make_draws(2),
    )
    model.vlm.model.vision_tower.features = features
    plan = make_plan(action_mode="both")
    torch.manual_seed(0)
    plain = _gradients(model, batch, draws, plan)
    model.checkpoint_gradients(True)
    torch.manual_seed(0)
    again = _gradients(model, batch, draws, plan)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_residual_dropout_is_only_active_in_training() -> None:
    model, batch, draws, plan = make_model(residual_dropout=0.5), as_batch(make_examples(1)), make_draws(1), make_plan()
    with torch.no_grad():
        trained = {float(model.train()(batch, draws, plan).total) for _ in range(2)}
        asked = {float(model.eval()(batch, draws, plan).total) for _ in range(2)}
    assert len(trained) == 2
    assert len(asked) == 1


def test_bfloat16_model_has_float32_norms_and_expert() -> None:
    exact, batch, draws = make_model(), as_batch(make_examples(2, answer=True)), make_draws(2)
    model = MolmoAct2(CONFIG, "bfloat16")
    model.load_state_dict(exact.state_dict())
    for name, parameter in model.named_parameters():
        precise = "norm" in name or name.startswith("action_expert.")
        assert parameter.dtype == (torch.float32 if precise else torch.bfloat16), name
    plan = make_plan(action_mode="both")
    rounded, expected = model(batch, draws, plan), exact(batch, draws, plan)
    assert rounded.total.dtype == torch.float32
    assert float(rounded.total.detach()) == pytest.approx(float(expected.total.detach()), rel=0.05)


def test_float32_model_ignores_autocast_of_the_caller() -> None:
    model, batch, draws, plan = make_model(), as_batch(make_examples(1)), make_draws(1), make_plan()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = model(batch, draws, plan)
    assert torch.equal(inside.total, model(batch, draws, plan).total)


def test_rejects_batch_without_labels_or_image_features() -> None:
    batch = as_batch(make_examples(1))
    with refused("training_targets_missing", "labels"):
        make_model()(batch, make_draws(1), make_plan(action_mode="both"))
    with refused("image_tokens_mismatch", len(batch.pooling) - 1):
        make_model()(replace(batch, pooling=batch.pooling[1:]), make_draws(1), make_plan())


def test_meta_model_is_complete_after_loading_weights() -> None:
    with torch.device("meta"):
        empty = MolmoAct2(CONFIG)
    full = make_model()
    empty.load_state_dict(full.state_dict(), assign=True)
    batch, draws, plan = as_batch(make_examples(1)), make_draws(1), make_plan()
    assert torch.equal(empty(batch, draws, plan).total, full(batch, draws, plan).total)


def _frozen(device: str, both: bool) -> tuple[list[MolmoAct2], PolicyBatch, FlowSamples, LossPlan]:
    """Return two equal models whose VLM requires no gradients. `freeze_vlm` was called on the second one."""
    models = [make_model().to(device).eval() for _ in range(2)]
    for model in models:
        model.vlm.requires_grad_(False)
    models[1].freeze_vlm(torch.device(device))
    return models, as_batch(make_examples(3)).to(device), make_draws(3).to(device), make_plan(bidirectional_images=both)


@pytest.mark.parametrize("both", [False, True])
def test_frozen_vlm_has_the_same_losses_gradients_and_velocities(both: bool) -> None:
    (plain, frozen), batch, draws, plan = _frozen("cpu", both)
    expected, actual = _gradients(plain, batch, draws, plan), _gradients(frozen, batch, draws, plan)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())
    assert torch.equal(plain(batch, draws, plan).flow_per_example, frozen(batch, draws, plan).flow_per_example)
    velocities = [m.velocities(batch, draws.noise, draws.times, plan)[0][0] for m in (plain, frozen)]
    assert torch.equal(*velocities)


@pytest.mark.gpu
def test_frozen_vlm_as_cuda_graph_has_the_same_gradients() -> None:
    (plain, frozen), _, _, plan = _frozen("cuda", True)
    for _ in range(2):
        for count in (3, 1, 2):
            batch, draws = as_batch(make_examples(count, seed=count)).to("cuda"), make_draws(count).to("cuda")
            expected, actual = _gradients(plain, batch, draws, plan), _gradients(frozen, batch, draws, plan)
            for name, value in expected.items():
                torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_on_gpu_are_as_precise_as_plain_ones(dtype: Precision) -> None:
    """Compares losses and gradients, with activation checkpointing, for two shapes."""
    models = [MolmoAct2(CONFIG, kind) for kind in ("float32", dtype, dtype)]
    for model in models:
        model.load_state_dict(make_model().state_dict())
        model.cuda().train().checkpoint_gradients(True)
    models[2].compile_layers(dynamic=True)
    plan = make_plan(action_mode="both", hides_answers=True)
    for extra in (0, 3):
        batch, draws = as_batch(make_examples(3, answer=True), extra=extra).to("cuda"), make_draws(3).to("cuda")
        losses = [float(model(batch, draws, plan).total) for model in models]
        assert abs(losses[2] - losses[0]) <= 3 * abs(losses[1] - losses[0]) + 1e-3 * losses[0]
        truth, theirs, ours = (_gradients(model, batch, draws, plan) for model in models)
        assert truth.keys() == ours.keys()
        whole = float(torch.stack([value.norm() for value in truth.values()]).norm())
        for name, value in truth.items():
            rounding = float((theirs[name].float() - value).norm())
            # A constant added to all scores of a softmax has no effect: its gradient is 0 up to rounding of sums that
            # cancel.
            least = 1e-6 * whole if name.endswith("k_proj.bias") else 1e-6
            assert float((ours[name].float() - value).norm()) <= 3 * rounding + 1e-2 * float(value.norm()) + least, name


@pytest.mark.gpu
def test_fused_bias_and_gelu_equal_the_formula_and_keep_adapters() -> None:
    torch.manual_seed(0)
    mlp = VisionMLP(CONFIG.molmo2().vision_config).to("cuda", torch.bfloat16)
    x = torch.randn(3, 9, 16, device="cuda", dtype=torch.bfloat16)
    first, second = (layer.weight.double() for layer in (mlp.fc1, mlp.fc2))
    inner = functional.gelu(x.double() @ first.t() + mlp.fc1.bias.double(), approximate="tanh")
    expected = inner @ second.t() + mlp.fc2.bias.double()
    plain = mlp(x)
    with torch.no_grad():
        fused = mlp(x)
        assert not torch.equal(fused, plain)
        adapted = nn.Linear(16, 24, device="cuda", dtype=torch.bfloat16)
        mlp.fc1 = nn.Sequential(mlp.fc1, nn.Identity())
        mlp.fc1.weight, mlp.fc1.bias = adapted.weight, adapted.bias  # a layer with an adapter exposes these attributes
        torch.testing.assert_close(mlp(x), plain, rtol=0, atol=0)
    for actual in (plain, fused):
        assert float((actual.double() - expected).norm() / expected.norm()) < 5e-3
