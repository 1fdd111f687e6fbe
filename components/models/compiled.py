"""A model whose layers are compiled: norms, activations and rotations become few kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from armature.components.contracts.errors import ConfigurationError
from armature.components.families.family import family_of
from armature.components.models.varlen import attention_compiles, under_autocast

# Gated MLPs of a width that tensor cores read slowly compute with zeros behind it.
#
# Rows of bf16 that are not whole 16 bytes, such as the 3,420 features of Qwen2.5-VL's vision MLP, take kernels of a
# third of the speed. Only products have the zeros: parameters and their gradients keep their shapes.

_ALIGNED, _TILE = 8, 64
_WIDENED, _NARROWED = ("gate_proj", "up_proj"), "down_proj"


def pad_widths(model: nn.Module) -> None:
    """Let each MLP down(act(gate(x)) * up(x)) whose width is no multiple of 8 compute at the next multiple of 64.

    A product costs a padded copy of its weight. Layers with adapters or in 4 bits stay as they are.
    """
    for mlp in model.modules():
        layers: list[Any] = [getattr(mlp, name, None) for name in (*_WIDENED, _NARROWED)]
        if any(type(layer) is not nn.Linear for layer in layers):
            continue
        *widened, narrowed = layers
        if narrowed.in_features % _ALIGNED == 0:
            continue
        for layer in widened:
            layer.__class__ = _Widened
        narrowed.__class__ = _Narrowed


class _Widened(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        """(..., out + more), 0 in the last `more`."""
        more = -self.out_features % _TILE
        (weight,) = under_autocast(self.weight)
        bias = None if self.bias is None else pad(self.bias, (0, more))
        return linear(x, pad(weight, (0, 0, 0, more)), bias)


class _Narrowed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        """Of x (..., in + more), whose last `more` count for nothing."""
        (weight,) = under_autocast(self.weight)
        return linear(x, pad(weight, (0, -self.in_features % _TILE)), self.bias)


VARIANTS = 64
"""How many variants of a layer's code are kept: with and without gradients, of the first layer and others, of few and
many tokens. torch keeps 8 by default, and goes on with plain layers, which are slower and round differently.
"""
_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
"""Numbers that operations pass on are rounded as without compilation, so log-probs stay those of the plain layers."""
_WHERE = "trainer.torch_compile"


def copy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a plain function, whose variants torch counts by themselves."""
    assert isinstance(function, FunctionType) and function.__closure__ is None
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each kind of layer of `model` once, for any number of tokens.

    Text layers recompute their activations as before, and attention that this project brings stays outside of them. A
    layer of a vision tower whose attention is compiled with it recomputes them in its own backward pass.

    Raises:
        ConfigurationError: the model has no layers as transformers makes them, or there is no compiler for C++.
    """
    check_compiler(_WHERE)
    torch._dynamo.config.recompile_limit = VARIANTS
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"{type(model).__name__} has no layers that are known here",
            code="layers_not_compilable",
            where=_WHERE,
            remedy="leave it out",
        )
    towers = [model.get_submodule(name) for name in family_of(model.config).vision]
    vision = {module for tower in towers if attention_compiles(tower) for module in tower.modules()}
    for layer in layers:
        forward = unwrap(type(layer).forward)
        recomputing = _recomputing(forward) if layer in vision else None
        layer.forward = partial(_forward, layer, _compiled(forward), recomputing)


def _forward(
    layer: Any, compiled: Callable[..., Any], recomputing: Callable[..., Any] | None, *args: Any, **more: Any
) -> Any:
    """As `GradientCheckpointingLayer` does it."""
    if not (layer.gradient_checkpointing and layer.training):
        return compiled(layer, *args, **more)
    if recomputing is not None and not any(part.training for part in layer.children()):
        return recomputing(layer, *args, **more)
    return layer._gradient_checkpointing_func(partial(compiled, layer, **more), *args)


@cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, dynamic=True, options=_OPTIONS)


@cache
def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps nothing but its inputs for the backward pass. Cheaper for the host than torch's checkpoint, which runs the
    layer's Python again. Random operations, such as dropout in training mode, would draw other numbers there.
    """

    def compiled(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=0.0):
            return compile_fx(graph, inputs, config_patches=_OPTIONS)

    return torch.compile(copy_function(forward), dynamic=True, backend=compiled)


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
            code="compiler_missing",
            where=where,
            remedy="install g++, or leave it out",
        ) from error
