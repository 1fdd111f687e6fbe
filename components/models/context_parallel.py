"""Context parallelism: several ranks share a packed sequence, and each has a slice of its tokens.

Everything but attention works on single tokens, so each rank computes its slice. Around attention, ranks exchange heads
for tokens, as in DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): each rank then has all tokens for some of the
heads and attends as a single rank would. All ranks of the group must call these functions in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from armature.components.contracts.errors import ConfigurationError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device` without waiting for work that the GPU has queued.

    Only copies from pinned memory are asynchronous.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")


@dataclass(frozen=True)
class ContextParallel:
    """One of the `size` ranks that share a sequence; `group` is their process group.

    Example:
        >>> rank = ContextParallel(rank=1, size=2, group=None)
        >>> rank.lengths(5), rank.slice(5)
        ([2, 3], slice(2, 5, None))
    """

    rank: int
    size: int
    group: Any

    def lengths(self, tokens: int) -> list[int]:
        """Return how many of a sequence's tokens each rank has, in the order of ranks. The numbers differ by at most
        one."""
        return [b - a for a, b in pairwise(tokens * rank // self.size for rank in range(self.size + 1))]

    def slice(self, tokens: int) -> slice:
        """Return the slice of a sequence's tokens that this rank has."""
        ends = [0, *accumulate(self.lengths(tokens))]
        return slice(ends[self.rank], ends[self.rank + 1])

    def check_heads(self, heads: int) -> None:
        """Check that a model's attention heads can be divided equally among the ranks.

        Raises:
            ConfigurationError: they cannot.
        """
        if heads % self.size:
            possible = [str(size) for size in range(2, heads + 1) if heads % size == 0]
            raise ConfigurationError(
                f"{heads} attention heads cannot be divided among {self.size} ranks",
                code="heads_not_divisible",
                where=f"machine.trainer.context_parallel = {self.size}",
                remedy=f"choose from {', '.join(possible)}" if possible else "leave it out",
            )

    def whole_sequence(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """Exchange tokens for heads. Inputs (t, H, D) have all heads of this rank's t tokens; results (T, H / size, D)
        have this rank's share of the heads for all T = `tokens` tokens.

        Key and value heads are repeated first if there are too few of them to be divided.
        """
        parts = []
        for tensor in (query, key, value):
            heads = lcm(tensor.shape[1], self.size)
            repeated = tensor.repeat_interleave(heads // tensor.shape[1], 1)
            parts.append(repeated.unflatten(1, (self.size, heads // self.size)))
        sent = torch.cat(parts, 2).transpose(0, 1).flatten(0, 1)
        received = self.exchange(sent, [len(query)] * self.size, self.lengths(tokens))
        return received.split([part.shape[2] for part in parts], 1)

    def own_tokens(self, out: Tensor) -> Tensor:
        """Exchange heads for tokens. The input (T, H / size, D) has this rank's share of the heads for all T tokens;
        the result (t, H, D) has all heads of this rank's t tokens."""
        lengths = self.lengths(len(out))
        count = lengths[self.rank]
        received = self.exchange(out, lengths, [count] * self.size)
        return received.unflatten(0, (self.size, count)).transpose(0, 1).flatten(1, 2)

    def exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send rows to all ranks and return the received rows. The first `sends[0]` rows go to rank 0, the next
        `sends[1]` to rank 1, and so on; `receives[i]` rows come from rank i, in order.

        Gradients are exchanged in the opposite direction.
        """
        received: Tensor = _Exchange.apply(rows, list(sends), list(receives), self.group)
        return received

    def combine_columns(self, columns: Tensor, mine: Tensor) -> Tensor:
        """Combine the columns of all ranks. Return the whole (K, N) matrix on every rank.

        The loss is assumed to be the same on every rank, so each rank keeps the gradient of its own columns.

        Args:
            columns: (K, n) columns of this rank.
            mine: (N,) bool: positions of these columns.
        """
        values: Tensor = _Combined.apply(columns, mine, self.group)
        return values


def all_to_all(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    """Send rows to all ranks of a group and return the rows received, without gradients."""
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
        ctx.back = receives, sends, group
        return all_to_all(rows, sends, receives, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(gradient, *ctx.back), None, None, None


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, columns: Tensor, mine: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(mine)
        values = columns.new_zeros(len(columns), len(mine))
        values[:, mine] = columns
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        return gradient[:, mine], None, None


@dataclass(frozen=True)
class FeatureExchange:
    """Sends image features from the ranks that encode the images to the ranks that have the images' tokens.

    Attributes:
        rows: (n,) int64: features that this rank sends, receiver after receiver.
        sends: number of features sent to each rank.
        receives: number of features received from each rank.
        order: (m,) int64: position of each image token's feature among those received.
        context: the ranks.
    """

    rows: Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    order: Tensor
    context: ContextParallel

    def __call__(self, features: Tensor) -> Tensor:
        """Return the features (m, D) of this rank's m image tokens. The argument has the features of the images that
        this rank encodes."""
        sent = features.index_select(0, self.rows)
        return self.context.exchange(sent, self.sends, self.receives).index_select(0, self.order)


def assign_encoders(image_tokens: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return for each distinct image the rank that encodes it. All ranks get about the same number of image tokens."""
    taken, chosen = [0] * ranks, [0] * len(image_tokens)
    for image in sorted(range(len(image_tokens)), key=lambda image: -image_tokens[image]):
        chosen[image] = taken.index(min(taken))
        taken[chosen[image]] += image_tokens[image]
    return tuple(chosen)


def images_encoded_by(rank: int, chosen: Sequence[int], image_tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the images that `rank` encodes: at least one, unless there are no images.

    FSDP gathers the vision tower on all ranks or on none, so a rank without images encodes the smallest one, and its
    features are not used.
    """
    assigned = tuple(image for image, other in enumerate(chosen) if other == rank)
    return assigned or tuple(sorted(range(len(chosen)), key=image_tokens.__getitem__)[:1])


def feature_exchange(
    context: ContextParallel,
    shown: Sequence[int],
    image_tokens: Sequence[int],
    chosen: Sequence[int],
    at: Tensor,
    n: int,
) -> FeatureExchange:
    """Plan the exchange of image features.

    Args:
        shown: images that a packed sequence of `n` tokens shows, in order.
        image_tokens: number of tokens of each distinct image.
        chosen: result of `assign_encoders`.
        at: (K,) positions of the images' tokens in the sequence, in order.
        n: number of tokens in the sequence.
    """
    ends = torch.tensor([*accumulate(context.lengths(n))])
    receiver = torch.bucketize(at, ends, right=True)
    first, taken = [], [0] * context.size
    for tokens, rank in zip(image_tokens, chosen, strict=True):
        first.append(taken[rank])
        taken[rank] += tokens
    row = torch.cat([torch.arange(first[image], first[image] + image_tokens[image]) for image in shown])
    sender = torch.tensor(chosen)[list(shown)].repeat_interleave(torch.tensor(image_tokens)[list(shown)])
    sent = [row[(sender == context.rank) & (receiver == rank)] for rank in range(context.size)]
    received = [((sender == rank) & (receiver == context.rank)).nonzero()[:, 0] for rank in range(context.size)]
    sends, receives = (tuple(map(len, each)) for each in (sent, received))
    return FeatureExchange(torch.cat(sent), sends, receives, torch.cat(received).argsort(), context)
