"""What a pool counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from armature.components.inference.client import Completion, GenerationFailure


@dataclass
class PoolStatistics:
    """Counts since the pool was made. `failures` is by reason; every sample asked for is in exactly one count."""

    began: float = field(default_factory=time.monotonic)
    requests: int = 0
    completions: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    timeouts: int = 0
    ejections: int = 0
    restarts: int = 0
    stragglers: int = 0
    """Shards of rollouts that were taken from workers because they were late."""
    continued: int = 0
    """Samples whose server got new weights between their request and their answer."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    request_seconds: float = 0.0
    """Sum over requests of the time from admission to answer."""

    def answered(self, results: Sequence[Completion | GenerationFailure], seconds: float) -> None:
        self.requests += 1
        self.request_seconds += seconds
        for result in results:
            if isinstance(result, GenerationFailure):
                self.failures[result.reason] += 1
            else:
                self.completions += 1
                self.prompt_tokens += result.prompt_token_ids.size
                self.completion_tokens += result.token_ids.size

    def failed(self, reason: str, samples: int) -> None:
        self.requests += 1
        self.failures[reason] += samples

    def counts(self) -> dict[str, int]:
        """All but the failures, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def snapshot(self) -> dict[str, float]:
        """Flat numbers for a log: counts, failures by reason, completion tokens per second of the pool's life."""
        numbers: dict[str, float] = dict(self.counts())
        numbers |= {f"failures/{reason}": count for reason, count in self.failures.items()}
        numbers["tokens_per_second"] = self.completion_tokens / max(time.monotonic() - self.began, 1e-9)
        numbers["mean_request_seconds"] = self.request_seconds / max(self.requests, 1)
        return numbers
