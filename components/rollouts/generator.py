"""What rollouts need of a model server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from components.inference.client import Completion, GenerationFailure
    from components.inference.settings import EvaluationSamplingSettings, SamplingSettings


class Generator(Protocol):
    """Anything that continues chat messages: the server pool, or a scripted policy."""

    async def complete(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: SamplingSettings | EvaluationSamplingSettings,
        seed: int,
    ) -> Completion:
        """One assistant message after `messages`.

        Raises:
            GenerationFailure: this request cannot be answered, others can.
        """

    async def sample(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: SamplingSettings | EvaluationSamplingSettings,
        seed: int,
        n: int,
    ) -> list[Completion | GenerationFailure]:
        """`n` assistant messages after the same `messages`, independent of each other; raises as `complete`."""
