"""The conversations of the recipe `sft/colors`, as a function of a user's own would return them."""

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
