from __future__ import annotations

import pytest
import torch
from torch import nn

from armature.components.models.lora import merged_weights
from armature.components.models.settings import AdapterSettings
from armature.components.robots.imitation.opening import add_adapters
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from tests.refusals import refused
from tests.robots.policies.molmoact2.examples import CONFIG, as_batch, make_examples

SETTINGS = AdapterSettings(rank=3, alpha=12.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 6)
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(self.tokens(ids))))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


IDS = torch.tensor([[0, 3, 7], [8, 9, 1]])


def test_new_adapters_change_neither_output_nor_weight_names(net: Net) -> None:
    before, names = net(IDS), net.state_dict().keys()
    assert add_adapters(net, lambda name: True, SETTINGS, seed=0) == ["first", "second"]
    assert torch.equal(net(IDS), before)
    assert dict(merged_weights(net)).keys() == names


def test_merged_weights_equal_the_adapters(net: Net) -> None:
    add_adapters(net, lambda name: name == "second", SETTINGS, seed=0)
    optimizer = torch.optim.SGD([p for n, p in net.named_parameters() if "lora" in n], lr=0.5)
    for _ in range(3):
        net(IDS).square().mean().backward()
        optimizer.step()
    plain = Net()
    plain.load_state_dict(dict(merged_weights(net)))
    assert not torch.equal(plain.second.weight, net.second.weight)
    torch.testing.assert_close(plain(IDS), net(IDS))


def test_adapters_of_bf16_layers_are_fp32(net: Net) -> None:
    net.bfloat16()
    add_adapters(net, lambda name: True, SETTINGS, seed=0)
    assert net(IDS).dtype == torch.bfloat16
    assert {p.dtype for n, p in net.named_parameters() if "lora" in n} == {torch.float32}
    net(IDS).float().sum().backward()
    assert net.first.weight.grad is None


def test_lora_a_has_initial_deviation_of_one_over_rank() -> None:
    net = nn.Sequential(nn.Linear(4000, 2))
    add_adapters(net, lambda name: True, AdapterSettings(rank=8, alpha=1.0), seed=0)
    down = net[0].lora_A["default"].weight.detach()
    assert float(down.std()) == pytest.approx(1 / 8, rel=0.02)


def test_rejects_model_without_linear_layer_for_adapters(net: Net) -> None:
    with refused("no_layer_for_adapters", "training.mode"):
        add_adapters(net, lambda name: name == "tokens", SETTINGS, seed=0)


def test_adapters_under_autocast_are_bitwise_equal_without_fp32_copies_of_the_input() -> None:
    model, batch = MolmoAct2(CONFIG, "bfloat16").eval(), as_batch(make_examples(2))
    names = add_adapters(model, lambda name: name.startswith("vlm.model.language_model"), SETTINGS, seed=0)
    layers = [model.get_submodule(name) for name in names]
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        nn.init.normal_(layer.lora_B["default"].weight, std=0.3, generator=generator)

    def states(casts: bool) -> torch.Tensor:
        for layer in layers:
            assert not layer.cast_input_dtype_enabled
            layer.cast_input_dtype_enabled = casts
        with torch.no_grad(), model.autocast(torch.device("cpu")):
            states_now = model.encode(batch, False).states
        for layer in layers:
            layer.cast_input_dtype_enabled = False
        return states_now

    seen: list[torch.dtype] = []
    layers[0].lora_A["default"].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    assert torch.equal(states(False), states(True))
    assert seen == [torch.bfloat16, torch.float32]
