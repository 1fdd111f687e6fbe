"""A packed sequence in slices, one for each of several ranks (context parallelism).

All of a model but attention works on tokens alone, so a rank computes those of its slice. Around attention the ranks
exchange heads for tokens, after DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): each then has all tokens for some
of the heads, and attends as one rank would. Every rank of the group calls the functions here in the same order.
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

# Tensors on their way to a device.


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """As `tensor.to(device)`, without waiting for what a GPU has been given to do before.

    Only copies from pinned memory are asynchronous.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")


@dataclass(frozen=True)
class ContextParallel:
    """This rank among the `size` that share a sequence. `group`: the process group that they exchange tensors in."""

    rank: int
    size: int
    group: Any

    def lengths(self, tokens: int) -> list[int]:
        """How many of a sequence's tokens each rank has, in order; some have one more than others."""
        return [b - a for a, b in pairwise(tokens * rank // self.size for rank in range(self.size + 1))]

    def slice(self, tokens: int) -> slice:
        """Which tokens of a sequence are this rank's."""
        ends = [0, *accumulate(self.lengths(tokens))]
        return slice(ends[self.rank], ends[self.rank + 1])

    def check_heads(self, heads: int) -> None:
        """
        Raises:
            ConfigurationError: the ranks cannot have equal parts of a model's attention heads.
        """
        if heads % self.size:
            possible = [str(size) for size in range(2, heads + 1) if heads % size == 0]
            raise ConfigurationError(
                f"{heads} attention heads cannot be divided among {self.size} ranks",
                code="heads_not_divisible",
                where=f"machine.trainer_context_parallel = {self.size}",
                remedy=f"choose from {', '.join(possible)}" if possible else "leave it out",
            )

    def whole_sequence(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """For this rank's part of the heads, all T = `tokens` tokens: (t, H, D) each to (T, H / size, D).

        Heads of keys and values that are too few to be divided are repeated before.
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
        """Of all heads this rank's t tokens: (T, H / size, D) to (t, H, D)."""
        lengths = self.lengths(len(out))
        own = lengths[self.rank]
        received = self.exchange(out, lengths, [own] * self.size)
        return received.unflatten(0, (self.size, own)).transpose(0, 1).flatten(1, 2)

    def exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send the next `sends[i]` of `rows` to rank i, for each i: what was received, `receives[i]` of each.

        Gradients go back the way that the rows came.
        """
        received: Tensor = _Exchange.apply(rows, list(sends), list(receives), self.group)
        return received

    def combine_columns(self, own: Tensor, mine: Tensor) -> Tensor:
        """(K, N) values of which this rank has those where `mine` (N,) is True, `own` (K, n), and others the others.

        Every rank is taken to make the same loss of them, so that each keeps the gradient of its own.
        """
        values: Tensor = _Joined.apply(own, mine, self.group)
        return values


def all_to_all(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
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


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, mine: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(mine)
        values = own.new_zeros(len(own), len(mine))
        values[:, mine] = own
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        return gradient[:, mine], None, None


@dataclass(frozen=True)
class FeatureExchange:
    """How features of images come from the ranks that encode them to those that have the images' tokens.

    Attributes:
        rows: (n,) int64: the features that this rank sends, receiver after receiver; `sends`: how many to each.
        receives: how many come from each rank.
        order: (m,) int64: where the feature of each of its image tokens is among those that it receives.
    """

    rows: Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    order: Tensor
    context: ContextParallel

    def __call__(self, features: Tensor) -> Tensor:
        """(m, D) features of this rank's tokens, of those that it has encoded."""
        sent = features.index_select(0, self.rows)
        return self.context.exchange(sent, self.sends, self.receives).index_select(0, self.order)


def assign_encoders(image_tokens: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Which rank encodes each of the distinct images, so that all have about as many tokens of them."""
    taken, chosen = [0] * ranks, [0] * len(image_tokens)
    for image in sorted(range(len(image_tokens)), key=lambda image: -image_tokens[image]):
        chosen[image] = taken.index(min(taken))
        taken[chosen[image]] += image_tokens[image]
    return tuple(chosen)


def images_encoded_by(rank: int, chosen: Sequence[int], image_tokens: Sequence[int]) -> tuple[int, ...]:
    """The images that `rank` encodes: of those that are there at least one, because FSDP gathers a tower on all ranks
    or none. What only keeps step goes to nobody.
    """
    own = tuple(image for image, other in enumerate(chosen) if other == rank)
    return own or tuple(sorted(range(len(chosen)), key=image_tokens.__getitem__)[:1])


def feature_exchange(
    context: ContextParallel,
    shown: Sequence[int],
    image_tokens: Sequence[int],
    chosen: Sequence[int],
    at: Tensor,
    n: int,
) -> FeatureExchange:
    """
    Args:
        shown: the images that a packed sequence of `n` tokens shows, in order.
        image_tokens: of each distinct image, how many tokens it has.
        chosen: see `assign_encoders`.
        at: (K,) where the sequence has the tokens of these images, in order.
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
