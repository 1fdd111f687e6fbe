"""Layers of both parts of MolmoAct2: RMS norms, rotary positions, the value head, and attention masks.

Norms and rotations are computed in float32, or float64 for float64 inputs, and rounded to the input's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.batch import PolicyBatch


def precise(x: Tensor) -> Tensor:
    """Return `x` as float32, or as float64 if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms(x: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + 1e-6) over the last dimension, in the input's dtype."""
    return functional.rms_norm(precise(x), x.shape[-1:], eps=1e-6).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS norm that multiplies by its weight before it rounds to the input's dtype; transformers rounds first."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(precise(x), x.shape[-1:], precise(self.weight), self.eps).to(x.dtype)


def rotary_angles(positions: Tensor, size: int, base: float) -> Tensor:
    """Return the angles position * base^(-i / (size / 2)), shape (..., size / 2) float32."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
    return positions.float()[..., None] * (1.0 / base**exponents)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + size / 2) of the last dimension by angles with cosines `cos` and sines `sin`."""
    first, second = precise(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


# --- Attention masks ---


def attention_mask(batch: PolicyBatch, bidirectional_images: bool) -> Tensor:
    """Mask of the VLM's attention, (B, 1, L, L) bool, True where a query (third dimension) attends to a key (last).

    A token attends to itself and the earlier tokens of its example. With `bidirectional_images`, image tokens also
    attend to later image tokens of the example. Padding counts as another example, so that no row of the mask is empty.
    """
    ids = batch.example_ids
    order = torch.arange(ids.shape[1], device=ids.device)
    visible = (order[:, None] >= order)[None]
    if bidirectional_images:
        visible = visible | (batch.image_tokens[:, :, None] & batch.image_tokens[:, None, :])
    return (visible & (ids[:, :, None] == ids[:, None, :]))[:, None]


def context_mask(batch: PolicyBatch, hides_answers: bool, config: MolmoAct2Config) -> Tensor:
    """Mask of tokens that the action expert attends to, (B, L) bool; padding is False.

    With `hides_answers`, EOS is hidden, and so are all tokens from <action_start> to <action_end>, or to the end of the
    example if there is no <action_end>.
    """
    visible = batch.example_ids >= 0
    if not hides_answers:
        return visible
    ids = batch.input_ids
    starts = _count(batch, ids == config.action_start_token_id)
    ended = _count(batch, ids == config.action_end_token_id) - (ids == config.action_end_token_id).long()
    return visible & (ids != config.eos_token_id) & (starts <= ended)


def _count(batch: PolicyBatch, marked: Tensor) -> Tensor:
    """Return (B, L) int64: for each token, the number of marked tokens in its example up to and including the token."""
    total = marked.long().cumsum(-1)
    ids = batch.example_ids
    first = torch.ones_like(marked)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    before = torch.where(first, total - marked.long(), 0).cummax(-1).values
    return total - before


@dataclass(frozen=True)
class ContextIndex:
    """Positions of the tokens that the action expert attends to, for each example.

    index: (E, S) int64 into the B x L tokens of a batch, counted row by row; S is the length of the longest context.
    valid: (E, S) bool, False for padding of shorter contexts.
    """

    index: Tensor
    valid: Tensor

    def gather(self, tokens: Tensor) -> Tensor:
        """Collect the context of each of E examples, (..., E, S, D), from B rows of L tokens, (..., B, L, D)."""
        gathered = tokens.flatten(-3, -2).index_select(-2, self.index.flatten())
        return gathered.unflatten(-2, self.index.shape)


def context_index(batch: PolicyBatch, visible: Tensor, width: int | None = None) -> ContextIndex:
    """Return the positions of each example's tokens that `visible` (see `context_mask`) marks, in order.

    Args:
        width: S, at least the length of the longest context, so that S does not depend on the batch and the CPU does
            not wait for the GPU; None: the length of the longest context.
    """
    slots = torch.where(visible, _count(batch, visible) - 1, -1)
    if width is None:
        width = int(slots.max()) + 1
    size = batch.examples * width
    # Tokens that are not visible are all scattered to one extra place at the end, which is cut off.
    places = torch.where(visible, batch.example_ids * width + slots, size).flatten()
    index = places.new_zeros(size + 1).scatter(0, places, torch.arange(len(places), device=places.device))
    valid = torch.zeros_like(index, dtype=torch.bool).scatter(0, places, True)
    shape = (batch.examples, width)
    return ContextIndex(index[:size].view(shape), valid[:size].view(shape))
