"""Compile a model's layers, so that norms, activations and rotary embeddings become few kernels; pad MLPs of odd
widths."""

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

# --- Padding of gated MLPs whose widths tensor cores read slowly ---

_ALIGNED, _TILE = 8, 64
"""Widths that are not a multiple of the first number are padded to a multiple of the second number."""
_WIDENED, _NARROWED = ("gate_proj", "up_proj"), "down_proj"
"""Layer names in a gated MLP: of the two layers whose outputs are padded, and of the layer whose input is padded."""


def pad_widths(model: nn.Module) -> None:
    """Let each MLP down(act(gate(x)) * up(x)) whose width is not a multiple of 8 compute at the next multiple of 64,
    with zeros.

    bf16 rows whose size is not a multiple of 16 bytes, such as the 3,420 features of Qwen2.5-VL's vision MLP, use
    kernels of a third of the speed. Only the products are padded: parameters and their gradients keep their shapes.
    Each product copies its weight once. Layers with adapters or 4-bit weights are not changed.
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
        """Return the layer's output followed by zeros, shape (..., out_features + padding)."""
        more = -self.out_features % _TILE
        (weight,) = under_autocast(self.weight)
        bias = None if self.bias is None else pad(self.bias, (0, more))
        return linear(x, pad(weight, (0, 0, 0, more)), bias)


class _Narrowed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x` (..., in_features + padding). The padding does not affect the result."""
        (weight,) = under_autocast(self.weight)
        return linear(x, pad(weight, (0, -self.in_features % _TILE)), self.bias)


# --- Compilation ---

_VARIANTS = 64
"""Number of compiled variants that torch may keep per layer type. Variants differ in gradients (with or without), in
the layer (the first or a later one) and in the number of tokens (few or many). torch keeps 8 by default and then falls
back to uncompiled layers, which are slower and round differently."""
COMPILE_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
"""Options of torch.compile. Compiled code then rounds intermediate results as eager mode does, so log-probs stay
equal."""
_WHERE = "trainer.torch_compile"


def copy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a plain function. torch counts the copy's compiled variants separately."""
    assert isinstance(function, FunctionType) and function.__closure__ is None
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each kind of layer of `model` once, for any number of tokens.

    Text layers recompute activations as before, and this project's attention stays outside of compiled code. A vision
    layer whose attention is compiled with it recomputes activations in its own backward pass.

    Raises:
        ConfigurationError: the model has no layers of transformers' kind, or there is no C++ compiler.
    """
    prepare_compiler(_WHERE)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"{type(model).__name__} has no layers of a kind that can be compiled here",
            code="layers_not_compilable",
            where=_WHERE,
            remedy="leave it out",
        )
    names = family_of(model.config).vision
    towers = [module for name, module in model.named_modules() if name in names]
    vision = {module for tower in towers if attention_compiles(tower) for module in tower.modules()}
    for layer in layers:
        forward = unwrap(type(layer).forward)
        recomputing = _recomputing(forward) if layer in vision else None
        layer.forward = partial(_forward, layer, _compiled(forward), recomputing)


def _forward(
    layer: Any, compiled: Callable[..., Any], recomputing: Callable[..., Any] | None, *args: Any, **more: Any
) -> Any:
    """Run the compiled code of a layer. Activations are recomputed in the same cases as in `GradientCheckpointingLayer`
    of transformers."""
    if not (layer.gradient_checkpointing and layer.training):
        return compiled(layer, *args, **more)
    if recomputing is not None and not any(part.training for part in layer.children()):
        return recomputing(layer, *args, **more)
    return layer._gradient_checkpointing_func(partial(compiled, layer, **more), *args)


@cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a layer's forward. The result saves outputs of matrix products and attention for the backward pass.

    By default Inductor also saves inputs of the backward pass's matrix products that are cheap to compute again: the
    outputs of norms and activations, and with autocast the cast weights. This is about a quarter of the memory.
    """
    return torch.compile(forward, dynamic=True, backend=_inductor(ban_recompute_materialized_backward=False))


@cache
def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a layer's forward. The result saves only its inputs and recomputes activations in the backward pass.

    This takes less host time than torch's checkpoint, which runs the layer's Python code again. Random operations, such
    as dropout in training mode, would draw other numbers in the recomputation.
    """
    return torch.compile(copy_function(forward), dynamic=True, backend=_inductor(activation_memory_budget=0.0))


def _inductor(**partitioner: Any) -> Callable[..., Any]:
    """Return torch.compile's backend with options of torch._functorch that decide what is saved for the backward
    pass."""

    def compiled(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with torch._functorch.config.patch(**partitioner):
            return compile_fx(graph, inputs, config_patches=COMPILE_OPTIONS)

    return compiled


def prepare_compiler(where: str) -> None:
    """Let torch keep `_VARIANTS` compiled variants, after checking that a C++ compiler is installed.

    Raises:
        ConfigurationError: no compiler is installed.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigurationError(
            "compiling layers needs a C++ compiler, and none is installed",
            code="compiler_missing",
            where=where,
            remedy="install g++, or leave it out",
        ) from error
    torch._dynamo.config.recompile_limit = _VARIANTS
