"""Which tokens attend to which: among the tokens of an example, and from the action expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from armature.components.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.policies.molmoact2.processing.batch import PolicyBatch


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
