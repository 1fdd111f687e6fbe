"""Low-rank adapters inside linear layers, whose own weights keep their names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from components.contracts.errors import ConfigurationError
from components.vla.settings import PolicyLoraSettings


class LoraLinear(nn.Linear):
    """y = W x + b + alpha / rank * up(down(dropout(x))), W and b frozen; down and up in fp32.

    `down` (rank, in) begins as N(0, 1 / rank) in standard deviations, `up` (out, rank) as zeros.
    """

    @classmethod
    def of(cls, linear: nn.Linear, settings: PolicyLoraSettings) -> LoraLinear:
        """With the weights of `linear`, not copies of them."""
        made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        made.weight.requires_grad_(False)
        if made.bias is not None:
            made.bias.requires_grad_(False)
        made.scale, made.dropout = settings.alpha / settings.rank, settings.dropout
        down, up = (settings.rank, linear.in_features), (linear.out_features, settings.rank)
        made.lora_down = nn.Parameter(torch.empty(down, device=linear.weight.device, dtype=torch.float32))
        made.lora_up = nn.Parameter(torch.zeros(up, device=linear.weight.device, dtype=torch.float32))
        made.train(linear.training)
        return made

    scale: float
    dropout: float
    lora_down: nn.Parameter
    lora_up: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        base = functional.linear(input, self.weight, self.bias)
        kept = functional.dropout(input, self.dropout, self.training).to(self.lora_down.dtype)
        added = functional.linear(functional.linear(kept, self.lora_down), self.lora_up)
        return base + (added * self.scale).to(base.dtype)


def add_adapters(model: nn.Module, chosen: Callable[[str], bool], settings: PolicyLoraSettings, seed: int) -> list[str]:
    """Put an adapter into every linear layer whose full name is `chosen`; their names.

    Raises:
        ConfigurationError: there is none.
    """
    layers = {n: module for n, module in model.named_modules() if type(module) is nn.Linear and chosen(n)}
    if not layers:
        raise ConfigurationError("no linear layer is left for an adapter", where="training.mode")
    random = torch.Generator().manual_seed(seed)
    for name, linear in layers.items():
        parent, _, last = name.rpartition(".")
        layer = LoraLinear.of(linear, settings)
        with torch.no_grad():
            drawn = torch.randn(layer.lora_down.shape, generator=random) / settings.rank
            layer.lora_down.copy_(drawn)
        setattr(model.get_submodule(parent), last, layer)
    return list(layers)
