"""The linear head with log-softmax and entropy in PyTorch, a block of the vocabulary at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from armature.components.vlm.heads import EXCLUDED
from armature.components.vlm.heads.linear import BlockStatistics, HeadBlock, LinearHead
from armature.components.vlm.heads.products import linear


class ChunkedHead(LinearHead):
    """On any device, in any dtype. The largest tensor has the logits of `chunk_tokens` tokens, in fp32 or better."""

    def statistics(self, hidden: Tensor, block: HeadBlock, targets: Tensor, keep: bool) -> BlockStatistics:
        width = self.width(len(hidden), len(block.weight))
        starts = range(0, len(block.weight), width)
        found = [self._part(hidden, block.part(start, width), targets - start) for start in starts]
        maximum, total, weighted, chosen = (torch.stack(parts) for parts in zip(*found, strict=True))
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
        # The temperature's share goes into the numbers per token: a pass over all logits costs as much as a product.
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
        """(N, width) logits after softcap and temperature, and the slope of the softcap."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        scale, cap = 1 / self.settings.temperature, self.settings.softcap
        bias = hidden.new_zeros(len(block.weight), dtype=dtype) if block.bias is None else block.bias
        excluded = torch.zeros_like(bias).masked_fill_(block.forbidden, EXCLUDED)
        if cap is None:
            return linear(bias * scale + excluded, hidden, block.weight.t(), scale), None
        bent = linear(bias, hidden, block.weight.t(), 1.0).div_(cap).tanh_()
        return (bent * (cap * scale)).add_(excluded), bent.square_().neg_().add_(1)


def _local(targets: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 1) columns of `z` that can be gathered, and (N,) where they are the targets'."""
    inside = (targets >= 0) & (targets < z.shape[1])
    return targets.where(inside, 0)[:, None], inside
