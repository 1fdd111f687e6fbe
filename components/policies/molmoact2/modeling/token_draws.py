"""Action tokens drawn at random, and their probabilities: p = softmax(logits / temperature)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """(N,) float64: ln p of `tokens` (N,), of logits (N, V) in any dtype.

    In float64, because a ratio of policies may be the exponential of a sum over a chunk's tokens.
    """
    found = torch.log_softmax(logits.float() / temperature, dim=-1)
    return found.gather(-1, tokens[:, None])[:, 0].double()


class TokenDraws:
    """Draws tokens step by step, those of row i by seed i alone, and keeps their log-probs.

    argmax(logits / temperature - ln e) with e ~ Exponential(1) for each token falls on a token with probability p (the
    Gumbel-max trick); e is drawn in float64, whose tails are long enough for rare tokens.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._temperature, self._logprobs = temperature, list[Tensor]()

    def __call__(self, logits: Tensor) -> Tensor:
        """(B,) int64, of logits (B, V)."""
        blank = torch.empty(logits.shape[-1], dtype=torch.float64, device=logits.device)
        drawn = torch.stack([blank.exponential_(generator=each).log() for each in self._generators])
        tokens = (logits.double() / self._temperature - drawn).argmax(-1)
        self._logprobs.append(token_logprobs(logits, tokens, self._temperature))
        return tokens

    @property
    def logprobs(self) -> Tensor:
        """(B, steps) float64 of all tokens that were drawn."""
        return torch.stack(self._logprobs, dim=1)
