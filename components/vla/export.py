"""The weights under the names of a model without adapters, each adapter added to its layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from components.vla.lora import LoraLinear

_ADDED = ("lora_down", "lora_up")


@torch.no_grad()
def exported(model: nn.Module, take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The state dict that `model` would have without adapters.

    Args:
        take: makes of a tensor, which may be a shard, a whole one on the CPU; every rank calls it in this order.
    """
    weights = {name: take(value) for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            place = f"{name}.weight"
            delta = weights[f"{name}.lora_up"].float() @ weights[f"{name}.lora_down"].float() * module.scale
            weights[place] = (weights[place].float() + delta).to(weights[place].dtype)
    return {name: value for name, value in weights.items() if name.rpartition(".")[2] not in _ADDED}
