"""Matrix products in 8 bits: both sides as float8_e4m3fn, one scale for each row of the input and of the weight
(https://arxiv.org/abs/2209.05433). An H100's data sheet has twice the operations per second of bf16 for them.

The weight stays beside its codes, so a checkpoint is read and written as before. There is no gradient: it is for layers
that are frozen, or only asked. On a CPU, where it serves tests, it is slower than bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from armature.components.contracts.errors import ConfigurationError

LARGEST = torch.finfo(torch.float8_e4m3fn).max
TINY = torch.finfo(torch.float32).tiny
CAPABILITY, MULTIPLE = (9, 0), 16
"""Of the first GPUs that multiply such numbers row by row, and of what both sizes of a weight are to be there."""


class FP8Linear(nn.Linear):
    """y = x W^T + b of the layer whose bfloat16 `weight` and `bias` it shares.

    codes: (out_features, in_features) float8_e4m3fn. scales: (1, out_features) float32. `quantize` makes both of
    `weight`, in place.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        codes, scales = quantize_rows(layer.weight.detach())
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales.t().contiguous(), persistent=False)

    @torch.no_grad()
    def quantize(self) -> None:
        codes, scales = quantize_rows(self.weight)
        self.codes.copy_(codes)
        self.scales.copy_(scales.t())

    def forward(self, x: Tensor) -> Tensor:
        """
        Raises:
            RuntimeError: `x` asks for a gradient.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a layer that computes in 8 bits has no gradient")
        codes, scales = quantize_rows(x.flatten(0, -2))
        if x.is_cuda:
            y = torch._scaled_mm(
                codes,
                self.codes.t(),
                scale_a=scales,
                scale_b=self.scales,
                bias=self.bias,
                out_dtype=self.weight.dtype,
                use_fast_accum=True,
            )
        else:
            with torch.autocast(x.device.type, enabled=False):
                exact = codes.float() @ self.codes.float().t() * (scales * self.scales)
                y = (exact if self.bias is None else exact + self.bias).to(self.weight.dtype)
        return y.unflatten(0, x.shape[:-1])


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(N, D) as codes, and (N, 1) float32 scales: codes times scales are about the rows."""
    scales = rows.abs().amax(-1, keepdim=True).float().div(LARGEST).clamp(min=TINY)
    return (rows.float() / scales).to(torch.float8_e4m3fn), scales


def quantize_layers(root: nn.Module, where: str) -> None:
    """Replace all linear layers below `root`.

    Raises:
        ConfigurationError: a weight is not bfloat16, or there is a GPU that cannot multiply such numbers, or none of
            these sizes.
    """
    layers = [(name, layer) for name, layer in root.named_modules() if isinstance(layer, nn.Linear)]
    for name, layer in layers:
        _refuse(name, layer, where)
    for name, layer in layers:
        root.set_submodule(name, FP8Linear(layer))


def _refuse(name: str, layer: nn.Linear, where: str) -> None:
    out, rows = layer.weight.shape
    if layer.weight.dtype != torch.bfloat16:
        raise ConfigurationError(
            "8-bit products take the place of those in bfloat16, and the policy computes in "
            f"{str(layer.weight.dtype).removeprefix('torch.')}",
            code="fp8_dtype_mismatch",
            where=where,
            remedy="take a policy whose dtype is bfloat16, or leave quantization out",
        )
    if not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability() < CAPABILITY:
        raise ConfigurationError(
            f"{torch.cuda.get_device_name()} has no products of 8-bit floats",
            code="fp8_unsupported",
            where=where,
            remedy="take an H100 or a newer GPU, or leave quantization out",
        )
    if out % MULTIPLE or rows % MULTIPLE:
        raise ConfigurationError(
            f"the weight of {name} is {out} x {rows}, and a GPU multiplies 8-bit floats in multiples of {MULTIPLE}",
            code="fp8_size_unsupported",
            where=where,
            remedy="leave quantization out",
        )
