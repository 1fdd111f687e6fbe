"""One reward, made as a recipe makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from armature.components.rewards.make import Rewards, make_rewards
from armature.components.rewards.reward import RewardInput, RewardSettings


def made(name: str, folder: Path = Path(), **arguments: Any) -> Rewards:
    return make_rewards([RewardSettings.model_validate({"name": name, **arguments})], folder=folder)


def grade(rewards: Rewards, completion: str, answer: Any, row: Mapping[str, Any] | None = None) -> float:
    (value,) = asyncio.run(rewards.grade(RewardInput(completion, answer, row or {}))).values()
    return value


def graded(name: str, completion: str, answer: Any, row: Mapping[str, Any] | None = None, **arguments: Any) -> float:
    with closing(made(name, **arguments)) as rewards:
        return grade(rewards, completion, answer, row)
