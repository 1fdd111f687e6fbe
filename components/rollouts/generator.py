"""What rollouts need of a model server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from components.contracts.rollouts import LogProbs, TokenIds

if TYPE_CHECKING:
    from components.inference.settings import SamplingSettings


class Generated(Protocol):
    """One sampled assistant message; arrays as in `components.contracts.rollouts.Turn`."""

    @property
    def prompt_token_ids(self) -> TokenIds: ...

    @property
    def completion_token_ids(self) -> TokenIds: ...

    @property
    def completion_logprobs(self) -> LogProbs: ...

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str: ...

    @property
    def policy_version(self) -> int: ...


class Generator(Protocol):
    """Anything that continues chat messages: the server pool, or a scripted policy."""

    async def complete(
        self, messages: Sequence[dict[str, Any]], sampling: SamplingSettings, seed: int
    ) -> Generated: ...
