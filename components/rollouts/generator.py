"""What rollouts need of a model server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from armature.components.inference.client import Completion, Message, Sampling


class Generator(Protocol):
    """Anything that continues chat messages: the server pool, or a scripted policy."""

    async def complete(self, messages: Sequence[Message], sampling: Sampling, seed: int) -> Completion:
        """One assistant message after `messages`.

        The members of a group ask at the same time with seeds that follow one another, so that where they are
        shown the same, one request to a server can sample for all of them.

        Raises:
            GenerationFailure: this request cannot be answered, others can.
        """
