"""Sampled chunks compared with Euler's method in float64, tokens with full forward passes, and rows with each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from armature.components.robots.policies import sampling
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.processing.batch import Example
from armature.components.robots.policies.molmoact2.sampling import Sampler
from tests.refusals import refused
from tests.robots.policies.molmoact2 import reference
from tests.robots.policies.molmoact2.examples import (
    CONFIG,
    DIMENSIONS,
    EOS,
    HORIZON,
    USED,
    VOCABULARY,
    as_batch,
    make_examples,
    make_model,
)

PLAN = InferencePlan(bidirectional_images=True, hides_answers=True, mask_dimensions=True, steps=10)
SEEDS = [11, 7, 2**63 + 5]


def _sampler(model: MolmoAct2, group: int = 1, **changes: object) -> Sampler:
    """Return a sampler of the model. If a group has several rows, the sampler pads as it does on a GPU."""
    sampler = Sampler(model, replace(PLAN, **changes), horizon=HORIZON, group=group, width=40, pad_id=0)
    sampler.group, sampler._padded = group, sampler._padded or group > 1
    return sampler


def _observed(count: int) -> list[Example]:
    return [replace(one, actions=None, horizon_padding=None) for one in make_examples(count)]


def _calm_model() -> MolmoAct2:
    """Make a model with velocities of about 1, as in a trained model."""
    model = make_model()
    with torch.no_grad():
        model.action_expert.final_layer.linear.weight.mul_(0.3)
    return model


@pytest.mark.parametrize("mask_dimensions", [True, False])
def test_euler_steps_equal_the_reference(mask_dimensions: bool) -> None:
    model, examples = _calm_model(), _observed(2)
    actual = _sampler(model, mask_dimensions=mask_dimensions).sample(examples, SEEDS[:2])
    weights = {name: value.detach().double() for name, value in model.action_expert.named_parameters()}
    for index, example in enumerate(make_examples(2)):
        batch = as_batch([example])
        with torch.no_grad():
            cache = model.encode(batch, bidirectional_images=True).cache
        noise = torch.randn(HORIZON, DIMENSIONS, generator=torch.Generator().manual_seed(SEEDS[index]))
        used = torch.arange(DIMENSIONS) < (USED if mask_dimensions else DIMENSIONS)
        expected = reference.sample(
            weights,
            noise.double(),
            10,
            [(keys[0].double(), values[0].double()) for keys, values in cache],
            batch.input_ids[0] != EOS,
            torch.ones(HORIZON, dtype=torch.bool),
            used,
            CONFIG.action_expert_config.num_heads,
        )
        torch.testing.assert_close(actual[index].double(), expected, rtol=1e-5, atol=1e-5)
        if mask_dimensions:
            assert not actual[index, :, USED:].any()


def test_flow_sde_rows_use_the_same_noise_and_are_independent() -> None:
    examples, seeds = _observed(3), [*SEEDS, 3, 4, 5, 6, 7, 8]
    sampler = Sampler(_calm_model(), PLAN, horizon=HORIZON, group=3, width=40, pad_id=0)
    assert sampler.sample_flow_sde(examples, SEEDS, 0.5).values is None
    torch.nn.init.normal_(sampler.model.add_value_head(0).layers[-1].weight)
    together = sampler.sample_flow_sde(examples * 3, seeds, 0.5)
    assert together.steps is not None and len(set(together.steps.tolist())) > 2
    assert together.values is not None and len(set(together.values.tolist())) == 7  # two rows come twice
    for row, seed in enumerate(seeds):
        alone = sampler.sample_flow_sde(examples[row % 3 :][:1], [seed], 0.5)
        assert all(torch.equal(value[0], vars(together)[name][row]) for name, value in vars(alone).items())
        step = int(together.steps[row])
        cut = Sampler(sampler.model, replace(PLAN, steps=10), horizon=HORIZON, group=1, width=40, pad_id=0)
        cut._velocity = lambda x, k, rest, velocity=sampler._velocity, step=step: velocity(x, k, rest) * (k < step)  # type: ignore
        assert torch.equal(cut.sample(examples[row % 3 :][:1], [seed])[0], together.before[row])
        assert not together.after[row, :, USED:].any() and together.after[row, :, :USED].all()
    narrow = sampler.sample_flow_sde(examples, SEEDS, 1e-7).actions
    torch.testing.assert_close(narrow, sampler.sample(examples, SEEDS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask_dimensions", [True, False])
def test_scored_chunk_equals_sampled_chunk_and_losses_equal_the_reference(mask_dimensions: bool) -> None:
    model, examples, seeds = _calm_model(), _observed(3), [*SEEDS, 3, 4, 5]
    sampler = _sampler(model, mask_dimensions=mask_dimensions)
    actual = sampler.score_flow_losses(examples * 2, seeds, 4)
    assert torch.equal(actual.actions, sampler.sample(examples * 2, seeds)) and actual.values is None
    weights = {name: value.detach().double() for name, value in model.action_expert.named_parameters()}
    used = torch.arange(DIMENSIONS) < (USED if mask_dimensions else DIMENSIONS)
    for row, seed in enumerate(seeds):
        alone = sampler.score_flow_losses(examples[row % 3 :][:1], [seed], 4)
        assert all(
            torch.equal(vars(alone)[name][0], vars(actual)[name][row]) for name in ("actions", "before", "logprobs")
        )
        batch = as_batch([make_examples(3)[row % 3]])
        with torch.no_grad():
            cache = model.encode(batch, bidirectional_images=True).cache
        context = [(keys[0].double(), values[0].double()) for keys, values in cache]
        seen, steps = batch.input_ids[0] != EOS, torch.ones(HORIZON, dtype=torch.bool)
        actions, errors = actual.actions[row].double(), torch.zeros(HORIZON, DIMENSIONS, dtype=torch.float64)
        for number, noise in enumerate(actual.before[row].double()):
            t = torch.tensor(number / 4 + 1 / 8, dtype=torch.float64)
            point = ((1 - t) * noise + t * actions) * used
            heads = CONFIG.action_expert_config.num_heads
            velocity = reference.velocity(weights, point, t, context, seen, steps, heads)
            errors += (velocity - (actions - noise)) ** 2 / 4
        torch.testing.assert_close(actual.logprobs[row][:, used], -errors[:, used], rtol=1e-5, atol=1e-5)
    torch.nn.init.normal_(model.add_value_head(0).layers[-1].weight)
    valued = sampler.score_flow_losses(examples, SEEDS, 4).values
    assert valued is not None and len(set(valued.tolist())) == 3


def test_cast_for_inference_is_bitwise_equal() -> None:
    model = MolmoAct2(CONFIG, "bfloat16")
    model.load_state_dict(_calm_model().state_dict())
    expected = _sampler(model, 2).sample(_observed(3), SEEDS)
    model.cast_for_inference()
    assert {p.dtype for p in model.action_expert.blocks.parameters()} == {torch.bfloat16}
    assert torch.equal(_sampler(model, 2).sample(_observed(3), SEEDS), expected)
    exact = _calm_model()
    exact.cast_for_inference()
    assert {p.dtype for p in exact.parameters()} == {torch.float32}


@pytest.mark.parametrize("group", [1, 2])
def test_padded_row_width_depends_only_on_its_length(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    monkeypatch.setattr(sampling, "TILE", 16)
    examples = [_observed(3)[index] for index in (1, 0, 2)]
    assert [one.length for one in examples] == [21, 12, 18]
    model = _calm_model()
    torch.nn.init.normal_(model.add_value_head(0).layers[-1].weight)
    sampler, plain = _sampler(model, group), _sampler(model)
    sampler._padded = True
    groups = {1: [([0], 32), ([2], 32), ([1], 16)], 2: [([0, 2], 32), ([1, 1], 16)]}
    assert [(rows, batch.input_ids.shape[1]) for rows, batch in sampler._groups(examples)] == groups[group]
    for answers in (
        lambda one: {"actions": one.sample(examples, SEEDS)},
        lambda one: vars(one.sample_flow_sde(examples, SEEDS, 0.5)),
        lambda one: vars(one.score_flow_losses(examples, SEEDS, 2)),
    ):
        torch.testing.assert_close(answers(sampler), answers(plain), rtol=0, atol=1e-4)
    assert sampler.generate(examples, 6) == plain.generate(examples, 6)
    sampler.width = 25
    assert {batch.input_ids.shape[1] for _, batch in sampler._groups(examples)} == {16, 25}


@pytest.mark.long
@pytest.mark.slow
def test_each_shape_has_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three group sizes and two widths are more shapes than torch compiles by default."""
    real, counters = torch.compile, torch._dynamo.utils.counters
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic, options: real(function, dynamic=dynamic, backend="eager")
    )
    monkeypatch.setattr(sampling, "TILE", 16)
    model, examples = _calm_model(), _observed(2)
    with torch._dynamo.config.patch(recompile_limit=8):  # restores the limit that compile_layers sets
        model.compile_layers(dynamic=False)
        counters.clear()
        for rows in (4, 1, 2):
            sampler = _sampler(model, rows)
            sampler._padded = True
            sampler.sample(examples, SEEDS[:2])
    assert not counters["unimplemented"]
    torch._dynamo.reset()


def _tokens_by_full_passes(model: MolmoAct2, example: Example, steps: int) -> list[int]:
    ids: list[int] = []
    with torch.no_grad():
        for _ in range(steps):
            longer = replace(
                example,
                input_ids=np.concatenate([example.input_ids, ids]).astype(np.int64),
                image_tokens=np.concatenate([example.image_tokens, np.zeros(len(ids), bool)]),
            )
            states = model.encode(as_batch([longer]), bidirectional_images=True).states
            ids.append(int(model.vlm.lm_head(states[0, -1]).argmax()))
            if ids[-1] == EOS:
                break
    return ids


@pytest.mark.parametrize("group", [1, 2])
def test_generated_tokens_equal_full_forward_passes(group: int) -> None:
    model, examples = make_model(), make_examples(3)
    expected = [_tokens_by_full_passes(model, example, 8) for example in examples]
    assert _sampler(model, group).generate(_observed(3), max_steps=8) == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_generation_ends_with_eos() -> None:
    model, examples = make_model(), make_examples(2)
    free = _tokens_by_full_passes(model, examples[0], 6)
    stop = free[3]
    ending = MolmoAct2(CONFIG.model_copy(update={"eos_token_id": stop}))
    ending.load_state_dict(model.state_dict())
    actual = _sampler(ending, 2).generate(_observed(2), max_steps=6)
    assert actual[0] == free[: free.index(stop) + 1]
    assert all(token < VOCABULARY for row in actual for token in row)


def test_rejects_example_longer_than_the_width() -> None:
    sampler = Sampler(make_model(), PLAN, horizon=HORIZON, group=1, width=8, pad_id=0)
    with refused("example_too_long", 21, 8, "observation 0"):
        sampler.sample(_observed(3)[1:2], [0])


@pytest.mark.gpu
def test_cuda_graph_is_bitwise_equal_to_the_loop() -> None:
    model, examples = _calm_model().cuda(), _observed(3)
    plain = _sampler(model, 2)
    plain._euler_steps, plain._flow_sde_steps, plain._scored_steps = plain._euler, plain._flow_sde, plain._scored
    graphed = _sampler(model, 2)
    expected, explored = plain.sample(examples, SEEDS), plain.sample_flow_sde(examples, SEEDS, 0.5)
    judged = plain.score_flow_losses(examples, SEEDS, 4)
    for _ in range(2):
        assert torch.equal(graphed.sample(examples, SEEDS), expected)
        actual = graphed.sample_flow_sde(examples, SEEDS, 0.5)
        assert all(torch.equal(value, vars(actual)[name]) for name, value in vars(explored).items() if name != "values")
        losses = graphed.score_flow_losses(examples, SEEDS, 4)
        for name in ("actions", "before", "logprobs"):
            assert torch.equal(vars(judged)[name], vars(losses)[name])
    for index in range(3):
        assert torch.equal(graphed.sample(examples[index : index + 1], SEEDS[index : index + 1])[0], expected[index])
    assert torch.equal(graphed.sample(examples[::-1], SEEDS[::-1]), expected.flip(0))
