"""The weights under the model's own names: adapters added, the embedding in one piece."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from components.vla.embedding import SplitEmbedding
from components.vla.lora import LoraLinear

_ADDED = ("lora_down", "lora_up", "new_rows")


@torch.no_grad()
def exported(model: nn.Module, take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The state dict that `model` would have without what training added to it.

    Args:
        take: makes of a tensor, which may be a shard, a whole one on the CPU; every rank calls it in this order.
    """
    weights = {name: take(value) for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        place = f"{name}.weight"
        if isinstance(module, LoraLinear):
            delta = weights[f"{name}.lora_up"].float() @ weights[f"{name}.lora_down"].float() * module.scale
            weights[place] = (weights[place].float() + delta).to(weights[place].dtype)
        elif isinstance(module, SplitEmbedding):
            weights[place] = torch.cat([weights[place][: module.first], weights[f"{name}.new_rows"]])
    return {name: value for name, value in weights.items() if name.rpartition(".")[2] not in _ADDED}
