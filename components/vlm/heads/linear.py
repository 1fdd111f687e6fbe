"""A linear head fused with log-softmax and entropy, without a tensor of tokens x vocabulary, and the backend "torch".

With z the logits after softcap and temperature, p = softmax(z), H = -sum p log p:

    log-prob of t = z_t - logsumexp(z)
    dL/dz_j = dlogp (1[j = t] - p_j) - dH p_j (log p_j + H)

The forward pass keeps logsumexp and H, (N,) each. The backward pass computes z again, one block of the vocabulary at a
time; a block gives its rows of dW completely, and a part of dh. If `chunk_tokens` allows for the logits of all N
tokens, a backend may keep exp(z - m) instead, where m is the largest z of a row in each of the backend's blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armature.components.contracts.errors import ConfigurationError
from armature.components.vlm.heads.backends import EXCLUDED, HeadSettings

# --- Matrix products of bf16 numbers whose sums stay in fp32 ---


def linear(bias: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return bias + scale a b in the dtype of `bias`. On GPUs products of bf16 numbers are never rounded to bf16."""
    if a.dtype == bias.dtype:
        return torch.addmm(bias, a, b, alpha=scale)
    if a.is_cuda:
        return torch.addmm(bias, a, b, alpha=scale, out_dtype=bias.dtype)
    return (a @ b).to(bias.dtype).mul_(scale).add_(bias)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Compute out = a b in the dtype of `out`, on GPUs without rounding to bf16."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a @ b)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute out += a b in the dtype of `out`, on GPUs without rounding to bf16."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out)
    if a.is_cuda:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.add_(a @ b)


KeptGradient = Callable[[Tensor, list[Tensor], list[Tensor]], Tensor]
"""A function (targets, saved, grads) that returns the gradient of the logits over the whole vocabulary.

The arguments are described in `LinearHead.logit_gradient`. The function can be called only once.
"""


class BlockStatistics(NamedTuple):
    """The logits of N tokens, summarized over each of S blocks of the vocabulary."""

    maximum: Tensor
    """Largest logit m = max z of each token in each block, shape (S, N)."""
    total: Tensor
    """Sum of exp(z - m) over the logits z of each block, shape (S, N)."""
    weighted: Tensor
    """Sum of exp(z - m) (z - m) over the logits z of each block, shape (S, N)."""
    chosen: Tensor
    """Logit of each token's target, shape (N,); -inf if the target has no probability."""
    gradient: KeptGradient | None = None
    """A function that computes the logits' gradient from values that the backend kept; None if it kept no values."""


class HeadBlock(NamedTuple):
    """Consecutive rows of the head's weight, in the dtype of matrix products, and their bias in fp32 or better."""

    weight: Tensor  # (width, D)
    bias: Tensor | None  # (width,)
    forbidden: Tensor  # (width,) bool

    def part(self, start: int, width: int) -> HeadBlock:
        """Return the block of `width` vocabulary rows of weight, bias and mask that begins at row `start`."""
        rows = slice(start, start + width)
        return HeadBlock(self.weight[rows], None if self.bias is None else self.bias[rows], self.forbidden[rows])


class LinearHead(ABC):
    """Base class of backends for linear heads. Subclasses differ in how they compute a block of logits."""

    def __init__(self, settings: HeadSettings, head: nn.Module, device: torch.device) -> None:
        layer = head.get_base_layer() if isinstance(head, LoraLayer) else head
        if not isinstance(layer, nn.Linear):
            raise ConfigurationError(
                f"the output head is a {type(layer).__name__}, not a linear layer",
                code="head_not_supported",
                where="trainer.logprobs",
                remedy="set trainer.logprobs = 'normal'",
            )
        self.settings = settings

    @abstractmethod
    def statistics(self, hidden: Tensor, block: HeadBlock, targets: Tensor, keep: bool) -> BlockStatistics:
        """Return the statistics of the logits over the whole vocabulary.

        Args:
            keep: there is memory for all logits until the backward pass, so values may be kept for it.
        """

    @abstractmethod
    def logit_gradient(
        self, hidden: Tensor, block: HeadBlock, targets: Tensor, saved: list[Tensor], grads: list[Tensor]
    ) -> Tensor:
        """Return the gradient (N, width) with respect to the linear layer's output, in the dtype of `hidden`.

        Args:
            targets: the targets' rows (N,) within the block; numbers outside of it are other blocks' targets.
            saved: logsumexp and entropy, (N,) each.
            grads: gradients (N,) of the log-probs and, if they have one, of the entropies.
        """

    def __call__(self, head: nn.Module, hidden: Tensor, targets: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = weight_and_bias(head)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        keep = torch.is_grad_enabled() and len(hidden) <= self.settings.chunk_tokens
        with torch.autocast(kind, enabled=False):
            results = _Function.apply(self, dtype, keep, hidden, weight, bias, targets, forbidden)
        return cast(tuple[Tensor, Tensor], results)

    def width(self, n_tokens: int, vocabulary: int) -> int:
        """Return the number of the head's rows in a block, a multiple of 256.

        A block for `n_tokens` tokens has about as many logits as `chunk_tokens` tokens have over the whole vocabulary.
        """
        wanted = self.settings.chunk_tokens * vocabulary // max(n_tokens, 1)
        return min(vocabulary, max(1, wanted // 256) * 256)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: LinearHead,
        dtype: torch.dtype,
        keep: bool,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        forbidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # An id beyond the head's rows is an image or a placeholder, which the head cannot choose.
        rows = targets.clamp(max=len(forbidden) - 1)
        targets = rows.where((targets == rows) & ~forbidden[rows], -1)
        blocks = head.statistics(hidden.to(dtype), _whole(weight, bias, forbidden, dtype), targets, keep)
        maximum = blocks.maximum.amax(0)
        below = blocks.maximum - maximum
        share = below.exp()
        total = (share * blocks.total).sum(0)
        normalizer = total.log()
        entropy = normalizer - (share * (blocks.weighted + below * blocks.total)).sum(0) / total
        ctx.save_for_backward(hidden, weight, bias, targets, forbidden, maximum + normalizer, entropy)
        ctx.head, ctx.dtype, ctx.gradient = head, dtype, blocks.gradient
        ctx.set_materialize_grads(False)
        return blocks.chosen - maximum - normalizer, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, forbidden, *saved = ctx.saved_tensors
        head: LinearHead = ctx.head
        grads = [torch.zeros_like(saved[0]) if d_logprobs is None else d_logprobs.where(targets >= 0, 0.0)]
        grads += [] if d_entropy is None else [d_entropy]
        rows, whole = hidden.to(ctx.dtype), _whole(weight, bias, forbidden, ctx.dtype)
        needs = dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad[3:6], strict=True))
        d_hidden = torch.zeros_like(hidden, dtype=saved[0].dtype) if needs["hidden"] else None
        d_weight = torch.empty_like(weight) if needs["weight"] else None
        d_bias = torch.empty_like(bias) if needs["bias"] else None
        gradient: KeptGradient | None = ctx.gradient
        ctx.gradient = None  # it works only once; a second backward pass computes z again
        width = head.width(len(hidden), len(weight)) if gradient is None else len(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(weight), width):
                block = whole.part(start, width)
                if gradient is None:
                    dz = head.logit_gradient(rows, block, targets - start, saved, grads)
                else:
                    dz = gradient(targets, saved, grads)
                if d_hidden is not None:
                    add_product(d_hidden, dz, block.weight)
                if d_weight is not None:
                    product(dz.t(), rows, d_weight[start : start + width])
                if d_bias is not None:
                    d_bias[start : start + width] = dz.sum(0, dtype=saved[0].dtype)
                del dz  # free its memory before the next block is computed
        return None, None, None, None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None


def _whole(weight: Tensor, bias: Tensor | None, forbidden: Tensor, dtype: torch.dtype) -> HeadBlock:
    precise = torch.promote_types(dtype, torch.float32)
    return HeadBlock(weight.to(dtype), None if bias is None else bias.to(precise), forbidden)


def weight_and_bias(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the head's weight (V, D) and bias (V,), with its adapters added if they are enabled."""
    if not isinstance(head, LoraLayer):
        return cast(Tensor, head.weight), cast("Tensor | None", head.bias)
    layer = head.get_base_layer()
    weight = layer.weight
    if not head.disable_adapters:
        for adapter in head.active_adapters:
            weight = weight + head.get_delta_weight(adapter)
    return weight, layer.bias


class ChunkedHead(LinearHead):
    """Backend "torch": PyTorch operations on one block of the vocabulary at a time, on any device and in any dtype.

    The largest tensor has the logits of `chunk_tokens` tokens, in fp32 or better.
    """

    def statistics(self, hidden: Tensor, block: HeadBlock, targets: Tensor, keep: bool) -> BlockStatistics:
        width = self.width(len(hidden), len(block.weight))
        starts = range(0, len(block.weight), width)
        blocks = [self._part(hidden, block.part(start, width), targets - start) for start in starts]
        maximum, total, weighted, chosen = (torch.stack(parts) for parts in zip(*blocks, strict=True))
        return BlockStatistics(maximum, total, weighted, chosen.amax(0))

    def _part(self, hidden: Tensor, block: HeadBlock, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z, _ = self._logits(hidden, block)
        local, inside = _local(targets, z)
        chosen = z.gather(1, local).squeeze(1).masked_fill(~inside, float("-inf"))
        maximum = z.amax(1)
        weights = z.sub_(maximum[:, None]).exp()
        return maximum, weights.sum(1), weights.mul_(z).sum(1), chosen

    def logit_gradient(
        self, hidden: Tensor, block: HeadBlock, targets: Tensor, saved: list[Tensor], grads: list[Tensor]
    ) -> Tensor:
        (normalizer, entropy), (d_logprobs, *d_entropy) = saved, grads
        z, slope = self._logits(hidden, block)
        log_p = z.sub_(normalizer[:, None])
        p = log_p.exp()
        # Apply the temperature to the numbers per token: a pass over all logits costs as much as a matrix product.
        g = d_logprobs[:, None] / self.settings.temperature
        if d_entropy:
            p.mul_(log_p.add_(entropy[:, None]).mul_(d_entropy[0][:, None] / -self.settings.temperature).sub_(g))
        else:
            p.mul_(-g)
        local, inside = _local(targets, p)
        p.scatter_add_(1, local, g * inside[:, None])
        if slope is not None:
            p.mul_(slope)
        return p.to(hidden.dtype)

    def _logits(self, hidden: Tensor, block: HeadBlock) -> tuple[Tensor, Tensor | None]:
        """Return logits (N, width) after softcap and temperature, and the slope of the softcap, if there is one."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        scale, cap = 1 / self.settings.temperature, self.settings.softcap
        bias = hidden.new_zeros(len(block.weight), dtype=dtype) if block.bias is None else block.bias
        excluded = torch.zeros_like(bias).masked_fill_(block.forbidden, EXCLUDED)
        if cap is None:
            return linear(bias * scale + excluded, hidden, block.weight.t(), scale), None
        bent = linear(bias, hidden, block.weight.t(), 1.0).div_(cap).tanh_()
        return (bent * (cap * scale)).add_(excluded), bent.square_().neg_().add_(1)


def _local(targets: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns (N, 1) at which `z` has the targets' logits, and a mask (N,) of targets that lie within `z`.

    For a target outside of `z` the column is 0.
    """
    inside = (targets >= 0) & (targets < z.shape[1])
    return targets.where(inside, 0)[:, None], inside
