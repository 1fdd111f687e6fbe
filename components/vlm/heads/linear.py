"""A linear head fused with log-softmax and entropy: no tensor of tokens x vocabulary unless one is kept on purpose.

With z the logits after softcap and temperature, p = softmax(z), H = -sum p log p:

    log-prob of t = z_t - logsumexp(z)
    dL/dz_j = dlogp (1[j = t] - p_j) - dH p_j (log p_j + H)

The forward pass keeps logsumexp and H, (N,) each. The backward pass computes z again, a block of the vocabulary at a
time: such a block gives its rows of dW at once, and its part of dh. Where `chunk_tokens` allows for the logits of all N
tokens, a backend may keep exp(z - m) instead, m being the largest z of a row in each of its blocks.
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
from armature.components.vlm.heads import HeadSettings
from armature.components.vlm.heads.products import add_product, product

KeptGradient = Callable[[Tensor, list[Tensor], list[Tensor]], Tensor]
"""Of targets, what was saved and gradients: as `LinearHead.logit_gradient` of the whole vocabulary, once."""


class BlockStatistics(NamedTuple):
    """Of S blocks of the vocabulary: (S, N) each, and (N,) the target's logit, -inf where it has no probability.

    `kept` makes the gradient of what the backend kept, if it did.
    """

    maximum: Tensor  # m = max z
    total: Tensor  # sum exp(z - m)
    weighted: Tensor  # sum exp(z - m) (z - m)
    chosen: Tensor
    kept: KeptGradient | None = None


class HeadBlock(NamedTuple):
    """Some rows of the head, in the dtype of matrix products; the bias is fp32 or better."""

    weight: Tensor  # (width, D)
    bias: Tensor | None  # (width,)
    forbidden: Tensor  # (width,) bool

    def part(self, start: int, width: int) -> HeadBlock:
        some = slice(start, start + width)
        return HeadBlock(self.weight[some], None if self.bias is None else self.bias[some], self.forbidden[some])


class LinearHead(ABC):
    """What backends for linear heads share; they differ in how a block of logits is made and used."""

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
        """Of the whole vocabulary. With `keep` there is memory for all logits until the backward pass."""

    @abstractmethod
    def logit_gradient(
        self, hidden: Tensor, block: HeadBlock, targets: Tensor, saved: list[Tensor], grads: list[Tensor]
    ) -> Tensor:
        """(N, width) gradient of what the linear layer gave, in the dtype of `hidden`.

        Args:
            targets: (N,) rows of the block, or outside of it.
            saved: (N,) logsumexp and entropy.
            grads: (N,) gradients of the log-probs and, where there is one, of the entropies.
        """

    def __call__(self, head: nn.Module, hidden: Tensor, targets: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = _linear(head)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        keep = torch.is_grad_enabled() and len(hidden) <= self.settings.chunk_tokens
        with torch.autocast(kind, enabled=False):
            found = _Function.apply(self, dtype, keep, hidden, weight, bias, targets, forbidden)
        return cast(tuple[Tensor, Tensor], found)

    def width(self, n_tokens: int, vocabulary: int) -> int:
        """Rows of the head in a block: it has as many logits as `chunk_tokens` tokens have. A multiple of 256."""
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
        # An id beyond the head's rows is an image or a placeholder: the head cannot choose it.
        rows = targets.clamp(max=len(forbidden) - 1)
        targets = rows.where((targets == rows) & ~forbidden[rows], -1)
        found = head.statistics(hidden.to(dtype), _whole(weight, bias, forbidden, dtype), targets, keep)
        maximum = found.maximum.amax(0)
        below = found.maximum - maximum
        share = below.exp()
        total = (share * found.total).sum(0)
        normalizer = total.log()
        entropy = normalizer - (share * (found.weighted + below * found.total)).sum(0) / total
        ctx.save_for_backward(hidden, weight, bias, targets, forbidden, maximum + normalizer, entropy)
        ctx.head, ctx.dtype, ctx.kept = head, dtype, found.kept
        ctx.set_materialize_grads(False)
        return found.chosen - maximum - normalizer, entropy

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
        kept: KeptGradient | None = ctx.kept
        ctx.kept = None  # a second backward pass computes z again
        width = head.width(len(hidden), len(weight)) if kept is None else len(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(weight), width):
                block = whole.part(start, width)
                if kept is None:
                    dz = head.logit_gradient(rows, block, targets - start, saved, grads)
                else:
                    dz = kept(targets, saved, grads)
                if d_hidden is not None:
                    add_product(d_hidden, dz, block.weight)
                if d_weight is not None:
                    product(dz.t(), rows, d_weight[start : start + width])
                if d_bias is not None:
                    d_bias[start : start + width] = dz.sum(0, dtype=saved[0].dtype)
                del dz  # or it would still be there while the next block is made
        return None, None, None, None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None


def _whole(weight: Tensor, bias: Tensor | None, forbidden: Tensor, dtype: torch.dtype) -> HeadBlock:
    precise = torch.promote_types(dtype, torch.float32)
    return HeadBlock(weight.to(dtype), None if bias is None else bias.to(precise), forbidden)


def _linear(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(V, D) weight and (V,) bias that the head stands for, its adapters added where they are switched on."""
    if not isinstance(head, LoraLayer):
        return cast(Tensor, head.weight), cast("Tensor | None", head.bias)
    layer = head.get_base_layer()
    weight = layer.weight
    if not head.disable_adapters:
        for adapter in head.active_adapters:
            weight = weight + head.get_delta_weight(adapter)
    return weight, layer.bias
