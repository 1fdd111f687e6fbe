"""Low-rank adapters in a policy, whose other modules stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.lora import lora_config
from armature.components.models.settings import AdapterSettings
from armature.components.policies.molmoact2.modeling.model import MolmoAct2


def add_adapters(
    model: nn.Module, chosen: Callable[[str], bool], settings: AdapterSettings, seed: int, dropout: float = 0.0
) -> list[str]:
    """Put an adapter into every linear layer whose full name is `chosen`; their names. All else is frozen.

    A, (rank, in), begins as N(0, 1 / rank) in standard deviations, B, (out, rank), as zeros; both are in fp32.

    Raises:
        ConfigurationError: there is no such layer.
    """
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and chosen(name)]
    if not names:
        raise ConfigurationError(
            "no linear layer is left for an adapter", code="no_layer_for_adapters", where="training.mode"
        )
    inject_adapter_in_model(lora_config(names, settings.rank, settings.alpha, dropout), model)
    random = torch.Generator().manual_seed(seed)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, LoraLayer)
        if isinstance(model, MolmoAct2) and model.precision == "bfloat16":
            layer.cast_input_dtype_enabled = False  # autocast computes in bf16: a copy in fp32 would be cast back
        down, up = layer.lora_A["default"].float(), layer.lora_B["default"].float()
        with torch.no_grad():
            down.weight.copy_(torch.randn(down.weight.shape, generator=random) / settings.rank)
            up.weight.zero_()
    return names
