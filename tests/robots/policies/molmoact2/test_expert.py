"""The action expert, compared with formulas in float64; its initialization; the checkpoint's configuration."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.expert import (
    ROPE_BASE,
    ActionExpert,
    ExpertBlock,
    has_kernel,
)
from armature.components.robots.policies.molmoact2.modeling.layers import ContextIndex, rotary_angles
from tests.refusals import refused
from tests.robots.policies.molmoact2 import reference
from tests.robots.policies.molmoact2.examples import CONFIG, DIMENSIONS, HORIZON, RAW, make_model

HEADS = CONFIG.action_expert_config.num_heads
TEXT = CONFIG.text_config


def _inputs(examples: int, draws: int, tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    shape = (examples, TEXT.num_key_value_heads, tokens, TEXT.head_dim)
    return {
        "actions": torch.randn(examples, draws, HORIZON, DIMENSIONS, generator=generator),
        "times": torch.rand(examples, draws, generator=generator),
        "cache": [
            tuple(torch.randn(shape, generator=generator).requires_grad_() for _ in range(2))
            for _ in range(TEXT.num_hidden_layers)
        ],
    }


@pytest.mark.parametrize("steps", [HORIZON, 2])
def test_velocity_and_gradients_equal_the_reference(steps: int) -> None:
    expert, inputs = make_model().action_expert, _inputs(2, 3, tokens=7)
    visible = torch.tensor([[True] * 7, [False, True, True, False, True, True, False]])
    valid = torch.arange(HORIZON).expand(2, -1) < steps
    context = ContextIndex(torch.arange(14).view(2, 7), visible)
    actual = expert(inputs["actions"], inputs["times"], inputs["cache"], context, valid)
    probe = torch.randn(actual.shape, generator=torch.Generator().manual_seed(6))
    leaves = [part for pair in inputs["cache"] for part in pair]
    gradients = torch.autograd.grad((actual * probe).sum(), leaves)

    weights = {name: value.detach().double() for name, value in expert.named_parameters()}
    doubles = [part.detach().double().requires_grad_() for part in leaves]
    total = torch.zeros((), dtype=torch.float64)
    for example in range(2):
        cache = [(k[example], v[example]) for k, v in zip(doubles[::2], doubles[1::2], strict=True)]
        for draw in range(3):
            expected = reference.velocity(
                weights,
                inputs["actions"][example, draw].double(),
                inputs["times"][example, draw].double(),
                cache,
                visible[example],
                valid[example],
                HEADS,
            )
            torch.testing.assert_close(actual[example, draw].double(), expected, rtol=1e-5, atol=1e-5)
            total = total + (expected * probe[example, draw].double()).sum()
    for ours, theirs in zip(gradients, torch.autograd.grad(total, doubles), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_padded_steps_have_zero_velocity_and_no_influence() -> None:
    expert, inputs = make_model().action_expert, _inputs(1, 1, tokens=4)
    context = ContextIndex(torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool))
    valid = torch.arange(HORIZON)[None] < 3
    masked = expert(inputs["actions"], inputs["times"], inputs["cache"], context, valid)
    short = expert(inputs["actions"][:, :, :3], inputs["times"], inputs["cache"], context, None)
    assert not masked[:, :, 3:].any()
    torch.testing.assert_close(masked[:, :, :3], short, rtol=0, atol=1e-5)


def test_initial_velocity_is_zero() -> None:
    expert = ActionExpert(CONFIG)
    expert.initialize(torch.Generator().manual_seed(0))
    inputs = _inputs(1, 2, tokens=4)
    context = ContextIndex(torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool))
    assert not expert(inputs["actions"], inputs["times"], inputs["cache"], context, None).any()
    for name, parameter in expert.named_parameters():
        zero = name.endswith("bias") or "modulation" in name or name == "final_layer.linear.weight"
        assert bool(parameter.any()) == (not zero), name
    hidden = CONFIG.action_expert_config.hidden_size
    largest = (6.0 / (2 * hidden)) ** 0.5
    assert float(expert.blocks[0].cross_attn.q_proj.weight.detach().abs().max()) <= largest
    assert float(expert.blocks[0].cross_attn.out_proj.weight.detach().abs().max()) <= largest / (2 * 3) ** 0.5


def test_configuration_round_trips() -> None:
    assert CONFIG.to_dict() == RAW
    changed = CONFIG.model_copy(update={"max_action_horizon": 9})
    assert changed.to_dict() == {**RAW, "max_action_horizon": 9}


@pytest.mark.parametrize(
    ("path", "value", "code", "shown"),
    [
        (("text_config", "hidden_size"), "wide", "invalid_policy_config", "text_config.hidden_size"),
        (("action_expert_config", "num_layers"), 4, "architecture_unsupported", "4"),
        (("action_expert_config", "qk_norm_eps"), 1e-5, "architecture_unsupported", "1e-05"),
        (("action_expert_depth_gate",), True, "architecture_unsupported", "True"),
        (("state_format",), "continuous", "architecture_unsupported", "'continuous'"),
        (("adapter_config", "pooling_attention_mask"), False, "architecture_unsupported", "False"),
    ],
)
def test_rejects_invalid_or_unsupported_configuration(path: tuple[str, ...], value: Any, code: str, shown: str) -> None:
    raw = copy.deepcopy(RAW)
    place = raw
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with refused(code, "somewhere/config.json", path[-1], shown):
        MolmoAct2Config.from_dict(raw, "somewhere/config.json")


def test_rejects_outdated_configuration() -> None:
    raw = {name: value for name, value in RAW.items() if name != "max_action_horizon"} | {"action_horizon": 5}
    with refused("policy_config_outdated", "max_action_horizon"):
        MolmoAct2Config.from_dict(raw)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_kernels_are_as_precise_as_plain_operations(compiled: bool) -> None:
    """Blocks have the released widths; with gradients enabled a block uses the plain operations."""
    torch.manual_seed(0)
    hidden, heads, rows, steps, length = 768, 8, 3, 10, 300
    block = ExpertBlock(hidden, heads, 2048).cuda()
    x, modulation = torch.randn(rows, steps, hidden), 0.3 * torch.randn(1, 9, 1, hidden)
    keys, values = (torch.randn(rows, length, heads, hidden // heads).transpose(1, 2) for _ in range(2))
    mask = torch.rand(rows, 1, 1, length) < 0.7
    angles = rotary_angles(torch.arange(steps), hidden // heads, ROPE_BASE)

    def read(dtype: torch.dtype) -> torch.Tensor:
        inputs = (each.cuda().to(dtype) for each in (x, modulation, angles.cos(), angles.sin(), keys, values))
        chunk, shifts, cos, sin, *context = inputs
        return block.to(dtype)(chunk, shifts, (cos.float(), sin.float()), *context, mask.cuda(), None)

    weights = {name: value.bfloat16().double() for name, value in block.state_dict().items()}
    block.load_state_dict(weights)
    exact, plain = read(torch.float64), read(torch.bfloat16)
    if compiled:
        block.compile(dynamic=False)
    with torch.no_grad():
        assert has_kernel(x.cuda().bfloat16(), steps)
        actual = read(torch.bfloat16)
    far, near = (float((each.double() - exact).norm() / exact.norm()) for each in (plain, actual))
    assert near < 1.2 * far
