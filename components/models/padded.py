"""Gated MLPs of a width that tensor cores read slowly compute with zeros behind it.

Rows of bf16 that are not whole 16 bytes, such as the 3,420 features of Qwen2.5-VL's vision MLP, take kernels of a third
of the speed. Only products have the zeros: parameters and their gradients keep their shapes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear, pad

from armature.components.models.varlen import under_autocast

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
