"""In which data type a model's weights are trained."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from peft import PeftModel
from torch import nn

from armature.components.contracts.errors import ConfigurationError
from armature.components.vlm.settings import TrainerSettings


def prepare_weights(model: nn.Module, settings: TrainerSettings) -> nn.Module:
    """`model`, of which what is trained is in fp32, or in bf16.

    An update of 1e-6 is lost in the 8 bits of a bf16 weight: of those the optimizer keeps the masters.

    Raises:
        ConfigurationError: weights of several dtypes without autocast, or loaded in another dtype than is asked for.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.weights == "bfloat16":
        adapters = trained if isinstance(model, PeftModel) else []  # PEFT makes them in fp32
        _set_dtype(adapters, torch.bfloat16)
        if (dtypes := _dtypes(model)) != {torch.bfloat16}:
            raise ConfigurationError(
                f"weights that compute in bfloat16 are to be loaded in it, and there are {_named(dtypes)}",
                code="weights_dtype_mismatch",
                where="trainer.weights",
                remedy="set model.dtype = 'bfloat16', or leave trainer.weights out",
            )
        return model
    _set_dtype(trained, torch.float32)
    if len(dtypes := _dtypes(model)) > 1 and settings.autocast == "none":
        raise ConfigurationError(
            f"weights of several types ({_named(dtypes)}) need autocast",
            code="autocast_missing",
            where="trainer.autocast",
            remedy="set trainer.autocast = 'bf16', or model.dtype = 'float32'",
        )
    return model


def _set_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def _dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(map(str, dtypes)))
