"""Make a tied output head follow the embedding when vLLM on a CPU loads new weights in place.

vLLM (0.26 to 0.32) lets a tied head share the embedding's parameter. On a CPU, vLLM multiplies with a packed copy of
the parameter, which it makes for its kernels when weights are loaded. It packs again only the layers that the
checkpoint has tensors for. A tied checkpoint has no tensor for the head, so after `reload_weights` or a weight transfer
the head still has the old weights.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def share_the_embedding() -> None:
    """Patch vLLM to use the embedding layer itself as the head of tied models on CPU, since that layer is repacked.

    Repeated calls have no further effect.
    """
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
