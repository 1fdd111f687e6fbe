"""Episodes of the bridge to verifiers, played by a function in place of a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import BytesIO
from typing import Any

from PIL import Image

from armature.components.contracts.episodes import Observation, Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.verifiers import VerifiersEnvironment


def environment(id: str, interface: str = "legacy", max_turns: int = 6, **changes: Any) -> VerifiersEnvironment:
    args = changes.pop("args", {})
    values = {"train_tasks": 6, "heldout_tasks": 3, "seed": 5, **changes}
    bridge = {"interface": interface, "id": id, "args": args, "max_turns": max_turns}
    made = make_environment(EnvironmentSettings(name="verifiers", args=bridge, **values))
    assert isinstance(made, VerifiersEnvironment)
    return made


async def play(
    bridge: VerifiersEnvironment, task: Task, answer: Callable[[int, Observation], str]
) -> tuple[list[Observation], dict[str, float], bool]:
    episode = bridge.episode(task)
    try:
        observations = [await episode.reset()]
        for turn in range(bridge.max_turns):
            outcome = await episode.step(answer(turn, observations[-1]))
            if outcome.observation is None:
                return observations, dict(outcome.reward_parts), True
            observations.append(outcome.observation)
        return observations, {}, False
    finally:
        await episode.close()
        await episode.close()


def run(bridge: VerifiersEnvironment, task: Task, answer: Callable[[int, Observation], str]) -> Any:
    return asyncio.run(asyncio.wait_for(play(bridge, task, answer), 60))


def color_of(observation: Observation) -> str:
    (image,) = (part for part in observation.content if isinstance(part, EncodedImage))
    with Image.open(BytesIO(image.data)) as opened:
        pixel = opened.convert("RGB").getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return ("red", "green", "blue")[pixel.index(max(pixel))]
