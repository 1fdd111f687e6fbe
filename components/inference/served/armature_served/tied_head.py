"""A tied output head that has the embedding's new weights after they were loaded in place, on CPU as well.

vLLM (0.26 to 0.32) lets a tied head share the embedding's parameter. On CPU it multiplies with a copy of it, packed
for its kernels when weights were loaded, and packs again only those layers that a checkpoint has tensors for. A tied
checkpoint has none for the head, so after `reload_weights` or a weight transfer the head is still the old one.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def share_the_embedding() -> None:
    """Make the embedding itself, which is packed again, the head of tied models on CPU. May be called repeatedly."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    theirs = ParallelLMHead.tie_weights
    if hasattr(theirs, "__wrapped__") or not current_platform.is_cpu():
        return

    @wraps(theirs)
    def tie_weights(self: Any, embed_tokens: Any) -> Any:
        plain = isinstance(getattr(embed_tokens, "quant_method", None), UnquantizedEmbeddingMethod)
        return embed_tokens if plain and self.bias is None else theirs(self, embed_tokens)

    ParallelLMHead.tie_weights = tie_weights
