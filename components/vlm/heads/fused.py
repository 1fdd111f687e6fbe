"""Backend "triton": the linear head fused with log-softmax and entropy in Triton kernels, with logits in registers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.flash import TRITON
from armature.components.vlm.heads.backends import HeadSettings
from armature.components.vlm.heads.linear import BlockStatistics, HeadBlock, LinearHead


@dataclass(frozen=True)
class TileConfig:
    """Tiling of a kernel: the tile of logits that one program computes, and compiler options."""

    rows: int
    columns: int
    depth: int
    """Hidden dimensions that one step of the matrix product covers."""
    warps: int
    stages: int
    group: int
    """Number of row tiles that share the columns of the weight in the L2 cache."""
    descriptors: bool
    """Load matrices with tensor descriptors through the copy engine (TMA, Hopper and later)."""


LARGE = TileConfig(128, 256, 64, warps=8, stages=3, group=16, descriptors=True)
"""The fastest of 33 tilings on an H200; it takes 144 KiB of shared memory."""
SMALL = TileConfig(128, 128, 32, warps=4, stages=3, group=8, descriptors=False)
FULL = TileConfig(64, 64, 32, warps=4, stages=2, group=8, descriptors=False)
"""Tiling for fp32, which is multiplied exactly and not in tensor cores: for comparison, not for speed."""
KEPT_ROWS = 16
"""Number of rows for which one program computes gradients from values that the forward pass kept."""


class FusedHead(LinearHead):
    """Backend for CUDA devices in bf16, fp16 and fp32, or interpreted on a CPU (TRITON_INTERPRET=1) in fp32.

    The backward pass works on blocks of logits, with as many numbers as the logits of `chunk_tokens` tokens have. For
    each block it computes the gradient in the dtype of the matrix products, and cuBLAS multiplies the gradient with the
    hidden states and with the weight. If one block can hold the whole vocabulary, the forward pass keeps exp(z - m), so
    that the backward pass does not compute logits again.
    """

    def __init__(self, settings: HeadSettings, head: nn.Module, device: torch.device) -> None:
        super().__init__(settings, head, device)
        other_backend = "set trainer.logprobs = 'torch'"
        if not TRITON:
            raise ConfigurationError(
                "triton is not installed",
                code="triton_missing",
                where="trainer.logprobs",
                remedy=f"pip install triton, or {other_backend}",
            )
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigurationError(
                f"the Triton kernels need a CUDA device, but the model is on {device}",
                code="triton_needs_cuda",
                where="trainer.logprobs",
                remedy=f"{other_backend}, or export TRITON_INTERPRET=1 to interpret the kernels, which is slow",
            )

    def statistics(self, hidden: Tensor, block: HeadBlock, targets: Tensor, keep: bool) -> BlockStatistics:
        from armature.components.vlm.heads.kernels import statistics_kernel

        tile = self._tile(hidden)
        parts = hidden.new_empty(3, -(-len(block.weight) // tile.columns), len(hidden), dtype=torch.float32)
        chosen = torch.full_like(parts[0, 0], float("-inf"))
        scaled = hidden.new_empty(len(hidden), len(block.weight)) if keep and self._can_keep(hidden.dtype) else None
        arguments = [targets, *parts, chosen, scaled]
        self._launch(statistics_kernel, tile, hidden, block, arguments, KEEP=scaled is not None)
        maximum, total, weighted = parts.unbind()
        # Clone the maxima, so that the rest of `parts` is freed.
        gradient = None if scaled is None else partial(self._kept_gradient, scaled, maximum.clone())
        return BlockStatistics(maximum, total, weighted, chosen, gradient)

    def _can_keep(self, dtype: torch.dtype) -> bool:
        """Check that exp(z - m) can be stored in `dtype`.

        In fp16 it cannot be stored, because it becomes 0 if z - m is below -17. With a softcap it must not become 0 in
        any dtype, because the slope of the softcap is computed from it.
        """
        cap, temperature = self.settings.softcap, self.settings.temperature
        return dtype != torch.float16 and (cap is None or 2 * cap / temperature < 80)

    def logit_gradient(
        self, hidden: Tensor, block: HeadBlock, targets: Tensor, saved: list[Tensor], grads: list[Tensor]
    ) -> Tensor:
        from armature.components.vlm.heads.kernels import gradient_kernel

        dz = hidden.new_empty(len(hidden), len(block.weight))
        both = [grads[0].contiguous(), grads[-1].contiguous()]
        arguments: list[Tensor | None] = [targets, *saved, *both, dz]
        self._launch(gradient_kernel, self._tile(hidden), hidden, block, arguments, ENTROPY=len(grads) > 1)
        return dz

    def _kept_gradient(
        self, scaled: Tensor, maximum: Tensor, targets: Tensor, saved: list[Tensor], grads: list[Tensor]
    ) -> Tensor:
        """Overwrite `scaled` (N, V), which has the values exp(z - m), with the gradient of the logits.

        Args:
            maximum: for each row and each tile of columns the largest logit m.
        """
        from armature.components.vlm.heads.kernels import kept_gradient_kernel

        n_rows, n_columns = scaled.shape
        if n_rows:
            kept_gradient_kernel[len(maximum), -(-n_rows // KEPT_ROWS)](
                scaled,
                maximum,
                targets,
                *saved,
                grads[0].contiguous(),
                grads[-1].contiguous(),
                n_rows,
                n_columns,
                1 / self.settings.temperature,
                self.settings.softcap or 0.0,
                ROWS=KEPT_ROWS,
                COLUMNS=self._tile(scaled).columns,
                SOFTCAP=self.settings.softcap is not None,
                ENTROPY=len(grads) > 1,
            )
        return scaled

    def _tile(self, hidden: Tensor) -> TileConfig:
        """Choose the tiling for these hidden states.

        Raises:
            ConfigurationError: the kernels do not support the dtype on this device.
        """
        # The kernels sum in fp32, so fp64 would lose precision. On a CPU, Triton 3.6's interpreter multiplies bf16
        # numbers as if their bits were integers.
        if hidden.dtype == torch.float64 or (not hidden.is_cuda and hidden.dtype != torch.float32):
            supported = "bfloat16, float16 or float32" if hidden.is_cuda else "float32, interpreted"
            dtype = str(hidden.dtype).removeprefix("torch.")
            raise ConfigurationError(
                f"the Triton kernels compute in {supported}, but the model is in {dtype}",
                code="triton_dtype_unsupported",
                where="trainer.logprobs",
                remedy="set trainer.logprobs = 'torch'",
            )
        if hidden.dtype == torch.float32:
            return FULL
        hopper = hidden.is_cuda and torch.cuda.get_device_capability(hidden.device)[0] in (9, 10)
        return LARGE if hopper else SMALL

    def _launch(
        self,
        kernel: Any,
        tile: TileConfig,
        hidden: Tensor,
        block: HeadBlock,
        arguments: list[Tensor | None],
        **more: bool,
    ) -> None:
        (n_rows, depth), n_columns = hidden.shape, len(block.weight)
        if not n_rows:
            return
        hidden, weight = hidden.contiguous(), block.weight.contiguous()
        described = tile.descriptors and depth * hidden.element_size() % 16 == 0
        kernel[(-(-n_rows // tile.rows) * -(-n_columns // tile.columns),)](
            _described(hidden, tile.rows, tile.depth) if described else hidden,
            _described(weight, tile.columns, tile.depth) if described else weight,
            block.bias,
            block.forbidden.view(torch.uint8),
            *arguments,
            n_rows,
            n_columns,
            1 / self.settings.temperature,
            self.settings.softcap or 0.0,
            depth,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            GROUP=tile.group,
            BIAS=block.bias is not None,
            SOFTCAP=self.settings.softcap is not None,
            DESCRIPTORS=described,
            **more,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _described(matrix: Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])
