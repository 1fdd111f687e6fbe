"""Numbers in few bits: blocks of a tensor with a scale each, and matrix products in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from armature.components.contracts.errors import ConfigurationError

# Numbers in few bits: blocks of a tensor with a scale each, and for each number the nearest of some codes.

AT_ONCE = 2**24
"""Numbers that are worked on at a time, a multiple of every block: a large tensor takes little besides itself."""


@dataclass(frozen=True)
class Codes:
    """`values`: what numbers are between -1 and 1, at most 256, from small to large; `block`: numbers with one scale.

    The scale of a block is its largest magnitude.
    """

    values: tuple[float, ...]
    block: int

    def blocks(self, numbers: int) -> int:
        return ceil(numbers / self.block)

    def quantize(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The indices (uint8, of the tensor's shape) of the codes nearest to value / scale, and the scales (fp32)."""
        flat, block = tensor.detach().reshape(-1), self.block
        indices = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
        scales = torch.empty(self.blocks(len(flat)), device=flat.device)
        values = self.table(flat.device)
        between = (values[1:] + values[:-1]) / 2
        for start in range(0, len(flat), AT_ONCE):
            part = flat[start : start + AT_ONCE].float()
            rows = pad(part, (0, -len(part) % block)).view(-1, block)
            largest = rows.abs().amax(1)
            rows = rows / largest.where(largest > 0, 1.0).unsqueeze(1)
            nearest = torch.bucketize(rows, between, out_int32=True).view(-1)[: len(part)]
            indices[start : start + AT_ONCE].copy_(nearest)
            scales[start // block : start // block + len(largest)] = largest
        return indices.view(tensor.shape), scales

    def dequantize(self, indices: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """code * scale, computed in fp32 and rounded once to `dtype`; of the shape of `indices`."""
        flat, block = indices.reshape(-1), self.block
        found = torch.empty(flat.shape, dtype=dtype, device=flat.device)
        values = self.table(flat.device)
        for start in range(0, len(flat), AT_ONCE):
            part = flat[start : start + AT_ONCE].int()
            own = scales[start // block : start // block + self.blocks(len(part))].float()
            rows = pad(values.index_select(0, part), (0, -len(part) % block)).view(-1, block)
            found[start : start + AT_ONCE] = rows.mul_(own.unsqueeze(1)).view(-1)[: len(part)]
        return found.view(indices.shape)

    @cached_property
    def _placed(self) -> dict[torch.device, Tensor]:
        return {}

    def table(self, device: torch.device) -> Tensor:
        """`values` on `device`, placed there once."""
        if device not in self._placed:
            self._placed[device] = torch.tensor(self.values, device=device)
        return self._placed[device]


NF4 = Codes(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    block=64,
)
"""4 bits for weights, which are about normal: https://arxiv.org/abs/2305.14314, appendix E."""


def _dynamic(signed: bool) -> tuple[float, ...]:
    """Seven powers of ten, the larger in finer steps: centers of 2^e (unsigned 2^(e+1)) equal parts of 0.1 to 1."""
    values = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        centers = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0 ** (exponent - 6) for i in range(parts)]
        values += centers + [-center for center in centers] * signed
    return tuple(sorted(values))


SIGNED, UNSIGNED = Codes(_dynamic(True), block=256), Codes(_dynamic(False), block=256)
"""8 bits for moments: dynamic tree quantization, block-wise (https://arxiv.org/abs/2110.02861)."""


# Matrix products in 8 bits: both sides as float8_e4m3fn, one scale for each row of the input and of the weight
# (https://arxiv.org/abs/2209.05433). An H100's data sheet has twice the operations per second of bf16 for them.
#
# The weight stays beside its codes, so a checkpoint is read and written as before. There is no gradient: it is for
# layers that are frozen, or only asked. On a CPU, where it serves tests, it is slower than bf16.

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
