"""A policy that answers from a script, with real token ids, in place of a model server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import TokenIds, Turn
from armature.components.contracts.stages import Artifact
from armature.components.inference.client import Completion
from armature.components.inference.settings import SamplingSettings

END = 256
SAMPLING = SamplingSettings(max_tokens=16)


def tokens(text: str) -> TokenIds:
    return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32)


def reply(messages: Sequence[Mapping[str, Any]], text: str, seed: int) -> Completion:
    """Return a completion with the given text. The bytes of a text are its token ids, and log-probs are random numbers
    that depend only on the seed."""
    completion = np.append(tokens(text), np.int32(END))
    logprobs = -np.random.default_rng(seed).random(len(completion), dtype=np.float32)
    return Completion(tokens(json.dumps(messages)), completion, logprobs, text, "stop", 3, "script", 0.0)


def a_turn(index: int, reward: float = 1.0) -> Turn:
    ids = np.arange(3, dtype=np.int32)
    image = ImageRef("ab" * 32, "image/png", 56, 56)
    logprobs = -ids.astype(np.float32)
    parts = {"correct": reward}
    return Turn(index, ids, ids, logprobs, "stop", 5, (image,), "[]", "red", reward, parts, None, None, None, 0.1, 0.0)


Script = Callable[[Sequence[Mapping[str, Any]], int], str]


@dataclass
class ScriptedPolicy:
    """A policy that answers a request with the text that `script(messages, seed)` returns, or raises its exception.

    `requests` has the messages and the seed of every request.
    """

    script: Script
    change: Callable[[Completion], Completion] = lambda completion: completion
    shuffle: bool = False
    requests: list[tuple[list[dict[str, Any]], int]] = field(default_factory=list)

    async def complete(self, messages: Sequence[dict[str, Any]], sampling: SamplingSettings, seed: int) -> Completion:
        self.requests.append((list(messages), seed))
        if self.shuffle:
            await asyncio.sleep(seed % 7 / 1000)
        return self.change(reply(messages, self.script(messages, seed), seed))


@dataclass
class RecordedEvents:
    bars: list[tuple[str, int, int, dict[str, float]]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        self.bars.append((name, done, total, postfix))

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def events() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture
def store(tmp_path) -> ImageStore:
    return ImageStore(tmp_path / "images")
