"""The conversations of the recipes `sft/colors` and `sft/colors-dpo`, as a user's own functions would return them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from armature.components.artifacts.images import decode
from armature.components.contracts.images import EncodedImage
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings

COUNT = 640
"""Number of conversations."""


def colors() -> Iterator[dict[str, Any]]:
    """Yield conversations about noisy images of one color, each with a question and the color's name.

    They are training tasks of the environment `colors`, so that it can evaluate the trained model on other images.
    """
    settings = EnvironmentSettings(name="colors", train_tasks=COUNT, heldout_tasks=1)
    environment: Any = make_environment(settings)
    for task in environment.tasks("train"):
        content = asyncio.run(environment.episode(task).reset()).content
        shown = [
            {"type": "image", "image": decode(part)}
            if isinstance(part, EncodedImage)
            else {"type": "text", "text": part}
            for part in content
        ]
        (answer,) = environment.demonstration(task)
        yield {"messages": [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]}


def color_pairs() -> Iterator[dict[str, Any]]:
    """Yield the same questions with two answers each: the color's name is chosen, and the next color's is rejected."""
    conversations = [row["messages"] for row in colors()]
    names = sorted({answer["content"] for _, answer in conversations})
    for question, answer in conversations:
        wrong = names[(names.index(answer["content"]) + 1) % len(names)]
        yield {"prompt": [question], "chosen": [answer], "rejected": [{"role": "assistant", "content": wrong}]}
