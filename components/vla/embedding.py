"""The input embedding with its new rows as a parameter of their own, so that they can be trained apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class SplitEmbedding(nn.Embedding):
    """Ids from `first` on are looked up in `new_rows`, the others in `weight`, whose last rows are then unused."""

    @classmethod
    def of(cls, embedding: nn.Embedding, first: int) -> SplitEmbedding:
        """With the weight of `embedding`, not a copy of it."""
        made = cls(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        made.weight, made.first = embedding.weight, first
        made.new_rows = nn.Parameter(embedding.weight.detach()[first:].clone())
        made.train(embedding.training)
        return made

    first: int
    new_rows: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        new = input >= self.first
        base = functional.embedding(input.masked_fill(new, 0), self.weight)
        added = functional.embedding((input - self.first).clamp(min=0), self.new_rows)
        return torch.where(new[..., None], added, base)
