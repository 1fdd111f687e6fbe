"""Frozen weights in 4 bits under adapters (QLoRA, https://arxiv.org/abs/2305.14314).

A weight is what its 4 bits stand for, rounded to the dtype of the model: with that the trainer computes, and that is
what servers get. Quantized again it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from armature.components.families.family import Family
from armature.components.models.blockwise import NF4
from armature.components.models.installed import TRITON

SCALES = "scales"


class NF4Linear(nn.Linear):
    """A frozen linear layer: `weight` (uint8, two codes in a byte, the first in its upper half) and `scales` (fp32).

    Nothing in 16 or 32 bits outlives a product: the backward pass makes the weight again.

    Args:
        layer: an even number of weights.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, layer.weight.dtype
        indices, scales = NF4.quantize(layer.weight)
        pairs = indices.view(-1, 2)
        self.weight = nn.Parameter((pairs[:, 0] << 4) | pairs[:, 1], requires_grad=False)
        self.register_buffer(SCALES, scales)
        layer.requires_grad_(False)
        self.bias = layer.bias

    def dequantized(self) -> Tensor:
        """(out_features, in_features) in the dtype that the layer had."""
        shape = torch.Size((self.out_features, self.in_features))
        return _dequantized(self.weight, self.get_buffer(SCALES), shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shape = torch.Size((self.out_features, self.in_features))
        product: Tensor = _Product.apply(x, self.weight, self.get_buffer(SCALES), self.bias, shape, self.dtype)
        return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.weight = shape, dtype
        return linear(
            x, _dequantized(packed, scales, shape, dtype).to(x.dtype), None if bias is None else bias.to(x.dtype)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return gradient @ _dequantized(*ctx.saved_tensors, *ctx.weight).to(gradient.dtype), None, None, None, None, None


def _dequantized(packed: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if packed.is_cuda and TRITON:
        from armature.components.models.nf4_kernel import dequantize

        return dequantize(packed, scales, dtype).view(shape)
    indices = torch.stack((packed >> 4, packed & 15), dim=-1)
    return NF4.dequantize(indices, scales, dtype).view(shape)


def quantized_layers(model: PreTrainedModel, family: Family) -> Iterator[tuple[str, nn.Linear]]:
    """Names and layers that get 4 bits: those of the language model, but its output head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and family.component_of(name) == "language":
            yield name, module


def quantize(model: PreTrainedModel, family: Family, device: str | torch.device) -> None:
    """Replace these layers, one after the other, by ones in 4 bits on `device`."""
    for name, layer in list(quantized_layers(model, family)):
        model.set_submodule(name, NF4Linear(layer.to(device)))
