"""The one method between rollouts and a trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from armature.components.contracts.batches import MultimodalBatch
from armature.components.contracts.rollouts import GenerateOutputs


class MultimodalAdapter(ABC):
    """Turns rollouts into the inputs of one model family.

    Subclass this to bring your own: `build_batch` is all that the trainer calls, and what it returns is checked
    with `armature.components.adapters.validate_batch`. The families that Armature knows come from `get_adapter`.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is the model's tokenizer, or its processor, which holds one."""
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)

    @abstractmethod
    def build_batch(self, outputs: GenerateOutputs) -> MultimodalBatch:
        """One batch of B rows from the trajectories of `outputs`."""
