"""Numbers in few bits: blocks of a tensor with a scale each, and for each number the nearest of some codes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad

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
