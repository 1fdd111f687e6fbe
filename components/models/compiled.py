"""A model whose layers are compiled: norms, activations and rotations become few kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from components.contracts.errors import ConfigurationError

VARIANTS = 64
"""How many variants of a layer's code are kept: with and without gradients, of the first layer and others, of few and
many tokens. torch keeps 8 by default, and goes on with plain layers, which are slower and round differently.
"""
_WHERE = "trainer.torch_compile"


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a plain function, whose variants torch counts by themselves."""
    assert isinstance(function, FunctionType) and function.__closure__ is None
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each kind of layer of `model` once, for any number of tokens.

    Activations are recomputed as before; attention that this project brings stays outside.

    Raises:
        ConfigurationError: the model has no layers as transformers makes them, or there is no compiler for C++.
    """
    check_compiler(_WHERE)
    torch._dynamo.config.recompile_limit = VARIANTS
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"{type(model).__name__} has no layers that are known here", where=_WHERE, remedy="leave it out"
        )
    for layer in layers:
        layer.forward = partial(_forward, layer, _compiled(unwrap(type(layer).forward)))


def _forward(layer: Any, compiled: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """As `GradientCheckpointingLayer` does it."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(compiled, layer, **more), *args)
    return compiled(layer, *args, **more)


@cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    # Numbers that operations pass on are rounded as without compilation, so log-probs stay those of the plain layers.
    return torch.compile(forward, dynamic=True, options={"emulate_precision_casts": True})


def check_compiler(where: str) -> None:
    """
    Raises:
        ConfigurationError: there is no compiler for C++.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigurationError(
            "layers are compiled by a compiler for C++, and there is none",
            where=where,
            remedy="install g++, or leave it out",
        ) from error
