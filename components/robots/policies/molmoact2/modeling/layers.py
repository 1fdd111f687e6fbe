"""RMS normalization and rotary positions, computed in float32 or better whatever the input's dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.batch import PolicyBatch


def precise(x: Tensor) -> Tensor:
    """As float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6) over the last dimension, in the input's dtype."""
    return functional.rms_norm(precise(x), x.shape[-1:], eps=1e-6).to(x.dtype)


class RMSNorm(nn.Module):
    """The weight multiplies before the result is rounded to the input's dtype; transformers' Molmo2 rounds first."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(precise(x), x.shape[-1:], precise(self.weight), self.eps).to(x.dtype)


def rotary_angles(positions: Tensor, size: int, base: float) -> Tensor:
    """(..., size / 2) float32: position times base^(-i / (size / 2))."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
    return positions.float()[..., None] * (1.0 / base**exponents)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + size / 2) of the last dimension by angles whose cosines and sines are given."""
    first, second = precise(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


# The value of what a policy sees: how much reward is still to come.


class ValueHead(nn.Module):
    """V = MLP(mean over the chunk of the action expert's last states, normed), in float32.

    Of a policy that answers with action tokens it reads the VLM's last state of the prompt instead.

    Its input has no gradient, so that it never changes the policy. A fresh one gives 0 for everything.

    Args:
        size: hidden, of the states, and of the two layers in between.
        seed: of the weights.
    """

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size), nn.SiLU(), nn.Linear(size, 1)
        )
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.layers[-1].weight)  # type: ignore[arg-type]

    def forward(self, states: Tensor) -> Tensor:
        """(N,) float32, of states (N, T, hidden)."""
        with torch.autocast(states.device.type, enabled=False):
            y: Tensor = self.layers(rms(precise(states.detach())).mean(1))
        return y.squeeze(-1)


# Which tokens attend to which: among the tokens of an example, and from the action expert.


def attention_mask(batch: PolicyBatch, bidirectional_images: bool) -> Tensor:
    """(B, 1, L, L) bool, True where a query (third dimension) sees a key (last).

    A token attends to the earlier tokens of its own example and itself; image tokens also attend to all later image
    tokens of the example where `bidirectional_images`. Padding counts as one more example, so that no row of the mask
    is empty.
    """
    ids = batch.example_ids
    order = torch.arange(ids.shape[1], device=ids.device)
    visible = (order[:, None] >= order)[None]
    if bidirectional_images:
        visible = visible | (batch.image_tokens[:, :, None] & batch.image_tokens[:, None, :])
    return (visible & (ids[:, :, None] == ids[:, None, :]))[:, None]


def context_mask(batch: PolicyBatch, hides_answers: bool, config: MolmoAct2Config) -> Tensor:
    """(B, L) bool, True on tokens that the expert of their example attends to: no padding.

    Where `hides_answers`, EOS is hidden, and everything from a start of actions to its end, or to the example's end
    where there is none.
    """
    seen = batch.example_ids >= 0
    if not hides_answers:
        return seen
    ids = batch.input_ids
    starts = _count(batch, ids == config.action_start_token_id)
    ended = _count(batch, ids == config.action_end_token_id) - (ids == config.action_end_token_id).long()
    return seen & (ids != config.eos_token_id) & (starts <= ended)


def _count(batch: PolicyBatch, marked: Tensor) -> Tensor:
    """How many tokens of its own example are marked up to each token, itself included."""
    total = marked.long().cumsum(-1)
    ids = batch.example_ids
    first = torch.ones_like(marked)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    before = torch.where(first, total - marked.long(), 0).cummax(-1).values
    return total - before


@dataclass(frozen=True)
class ContextIndex:
    """Where the tokens lie that an example's expert attends to.

    index: (E, S) int64 into the B x L tokens of a batch, row by row; S is the longest context. valid: (E, S) bool.
    """

    index: Tensor
    valid: Tensor

    def gather(self, tokens: Tensor) -> Tensor:
        """(..., B, L, D) to (..., E, S, D)."""
        found = tokens.flatten(-3, -2).index_select(-2, self.index.flatten())
        return found.unflatten(-2, self.index.shape)


def context_index(batch: PolicyBatch, seen: Tensor, width: int | None = None) -> ContextIndex:
    """The tokens that `seen` (of `context_mask`) marks, example by example, in order.

    Args:
        width: S, at least the longest context, where it must not depend on the batch, and then nothing asks the GPU;
            none: the longest context.
    """
    slots = torch.where(seen, _count(batch, seen) - 1, -1)
    if width is None:
        width = int(slots.max()) + 1
    size = batch.examples * width
    places = torch.where(seen, batch.example_ids * width + slots, size).flatten()  # what is not seen goes to one more
    index = places.new_zeros(size + 1).scatter(0, places, torch.arange(len(places), device=places.device))
    valid = torch.zeros_like(index, dtype=torch.bool).scatter(0, places, True)
    shape = (batch.examples, width)
    return ContextIndex(index[:size].view(shape), valid[:size].view(shape))
