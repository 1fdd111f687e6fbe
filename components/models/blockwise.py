"""Block-wise quantization to 4 or 8 bits with a scale per block, and matrix products in float8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from armature.components.contracts.errors import ConfigurationError

# --- Block-wise quantization ---

CHUNK = 2**24
"""Number of values that are quantized at a time, so that a large tensor needs little extra memory. It is a multiple of
every block size."""


@dataclass(frozen=True)
class Codes:
    """Block-wise quantization to the nearest of at most 256 codes.

    Attributes:
        values: the codes, between -1 and 1, in ascending order.
        block: number of values that share a scale, which is their largest magnitude.

    Example:
        >>> codes = Codes((-1.0, 0.0, 1.0), block=2)
        >>> indices, scales = codes.quantize(torch.tensor([0.1, -3.0, 0.0, 0.5]))
        >>> codes.dequantize(indices, scales).tolist()
        [0.0, -3.0, 0.0, 0.5]
    """

    values: tuple[float, ...]
    block: int

    def blocks(self, numbers: int) -> int:
        """Return the number of blocks that `numbers` values need."""
        return ceil(numbers / self.block)

    def quantize(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each value the index of the code nearest to value / scale (uint8, in the tensor's shape), and the
        scale of each block (fp32)."""
        flat, block = tensor.detach().reshape(-1), self.block
        indices = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
        scales = torch.empty(self.blocks(len(flat)), device=flat.device)
        values = self.table(flat.device)
        between = (values[1:] + values[:-1]) / 2
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK].float()
            rows = pad(part, (0, -len(part) % block)).view(-1, block)
            largest = rows.abs().amax(1)
            rows = rows / largest.where(largest > 0, 1.0).unsqueeze(1)
            nearest = torch.bucketize(rows, between, out_int32=True).view(-1)[: len(part)]
            indices[start : start + CHUNK].copy_(nearest)
            scales[start // block : start // block + len(largest)] = largest
        return indices.view(tensor.shape), scales

    def dequantize(self, indices: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return code * scale, computed in fp32 and rounded once to `dtype`, in the shape of `indices`."""
        flat, block = indices.reshape(-1), self.block
        values = torch.empty(flat.shape, dtype=dtype, device=flat.device)
        table = self.table(flat.device)
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK].int()
            factors = scales[start // block : start // block + self.blocks(len(part))].float()
            rows = pad(table.index_select(0, part), (0, -len(part) % block)).view(-1, block)
            values[start : start + CHUNK] = rows.mul_(factors.unsqueeze(1)).view(-1)[: len(part)]
        return values.view(indices.shape)

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        """Cache of the codes as a tensor, with one copy per device."""
        return {}

    def table(self, device: torch.device) -> Tensor:
        """Return the codes as a tensor on `device`. They are copied to each device only once."""
        if device not in self._tables:
            self._tables[device] = torch.tensor(self.values, device=device)
        return self._tables[device]


NF4 = Codes(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    block=64,
)
"""4-bit codes for weights, whose distribution is roughly normal: https://arxiv.org/abs/2305.14314, appendix E."""


def _dynamic(signed: bool) -> tuple[float, ...]:
    """Return codes over seven powers of ten, with more codes for larger values. For e from 0 to 6, the range from 0.1
    to 1 is divided into 2^e equal parts (2^(e+1) if unsigned); the centers of the parts times 10^(e-6) are codes. 0 and
    1 are added."""
    values = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        centers = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0 ** (exponent - 6) for i in range(parts)]
        values += centers + [-center for center in centers] * signed
    return tuple(sorted(values))


SIGNED, UNSIGNED = Codes(_dynamic(True), block=256), Codes(_dynamic(False), block=256)
"""8-bit codes for optimizer moments: block-wise dynamic quantization (https://arxiv.org/abs/2110.02861)."""


# --- Matrix products in float8 ---

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""Largest number of the dtype float8_e4m3fn."""
TINY = torch.finfo(torch.float32).tiny
"""Smallest scale, so that rows of zeros do not divide by 0."""
CAPABILITY, MULTIPLE = (9, 0), 16
"""Lowest compute capability of a GPU with float8 matrix products that have a scale per row. These products require that
both sizes of a weight are multiples of the second number."""


class FP8Linear(nn.Linear):
    """Linear layer y = x W^T + b that multiplies in float8, and shares the bfloat16 `weight` and `bias` of another
    layer.

    Input and weight are converted to float8_e4m3fn with a scale per row (https://arxiv.org/abs/2209.05433). By its data
    sheet, an H100 does twice as many such operations per second as bf16 ones. The weight stays beside its codes, so
    checkpoints are read and written as before. There is no gradient: the layer is for frozen weights and for inference.
    On a CPU, where only tests use it, it is slower than bf16.

    Attributes:
        codes: (out_features, in_features) float8_e4m3fn, computed from `weight`.
        scales: (1, out_features) float32.
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
        """Recompute codes and scales from the weight, in place."""
        codes, scales = quantize_rows(self.weight)
        self.codes.copy_(codes)
        self.scales.copy_(scales.t())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in float8.

        Raises:
            RuntimeError: `x` requires a gradient.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a layer that multiplies in float8 has no gradient")
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
    """Quantize (N, D) rows to float8. Return the codes (N, D) and one float32 scale per row, (N, 1); code * scale
    approximates the row."""
    scales = rows.abs().amax(-1, keepdim=True).float().div(LARGEST).clamp(min=TINY)
    return (rows.float() / scales).to(torch.float8_e4m3fn), scales


def quantize_layers(root: nn.Module, where: str) -> None:
    """Replace all linear layers below `root` by `FP8Linear`.

    Raises:
        ConfigurationError: a weight is not bfloat16, or the GPU does not support float8 products or these sizes.
    """
    layers = [(name, layer) for name, layer in root.named_modules() if isinstance(layer, nn.Linear)]
    for name, layer in layers:
        _check_layer(name, layer, where)
    for name, layer in layers:
        root.set_submodule(name, FP8Linear(layer))


def _check_layer(name: str, layer: nn.Linear, where: str) -> None:
    """Raise a ConfigurationError if this layer cannot be replaced."""
    out, rows = layer.weight.shape
    if layer.weight.dtype != torch.bfloat16:
        raise ConfigurationError(
            "8-bit products replace products in bfloat16, but the policy computes in "
            f"{str(layer.weight.dtype).removeprefix('torch.')}",
            code="fp8_dtype_mismatch",
            where=where,
            remedy="use a policy whose dtype is bfloat16, or leave quantization out",
        )
    if not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability() < CAPABILITY:
        raise ConfigurationError(
            f"{torch.cuda.get_device_name()} cannot multiply 8-bit floats",
            code="fp8_unsupported",
            where=where,
            remedy="use an H100 or a newer GPU, or leave quantization out",
        )
    if out % MULTIPLE or rows % MULTIPLE:
        raise ConfigurationError(
            f"the weight of {name} is {out} x {rows}, but GPUs multiply 8-bit floats only in multiples of {MULTIPLE}",
            code="fp8_size_unsupported",
            where=where,
            remedy="leave quantization out",
        )
