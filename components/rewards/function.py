"""A function of the user's, in a file beside the recipe or in an installed package."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from armature.components.contracts.errors import ConfigurationError
from armature.components.project_modules import find_module, load_object
from armature.components.rewards.reward import IsolatedSettings, Reward, RewardInput
from armature.components.sources.code import code_digest

GIVEN = ("completion", "answer", "row")


class FunctionSettings(IsolatedSettings):
    """The number that a Python function returns."""

    function: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="MODULE:FUNCTION, of a file beside the recipe or of an installed package.",
    )


class Function(Reward[FunctionSettings]):
    """Calls it by keyword with what it names of `completion`, `answer` and `row`; it may be async.

    It returns a number, or true or false. Whatever else it does costs its rollout.
    """

    Settings: ClassVar = FunctionSettings
    runs = "process"

    def __init__(self, settings: FunctionSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._function = load_object(settings.function, "function")
        self._taken = taken(self._function, settings.function)

    @staticmethod
    def sources(settings: FunctionSettings) -> dict[str, str]:
        module, _, _ = settings.function.partition(":")
        find_module(module)
        return {"function": code_digest(module)}

    def grade(self, given: RewardInput) -> Any:
        value = self._function(**{name: getattr(given, name) for name in self._taken})
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def taken(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """What of `GIVEN` the function takes by keyword.

    Raises:
        ConfigurationError: it is not a function, or takes other arguments.
    """
    remedy = "def reward(completion: str, answer, row: dict) -> float, of which it may leave out what it does not use"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name!r} is not a function: {error}", code="not_a_function", remedy=remedy
        ) from error
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    required = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    found = tuple(each for each in GIVEN if each in names or everything)
    if unknown := [each for each in required if each not in found]:
        raise ConfigurationError(
            f"{name!r} takes {unknown[0]!r}, which a reward is not given", code="unknown_reward_argument", remedy=remedy
        )
    if "completion" not in found:
        raise ConfigurationError(f"{name!r} does not take the completion", code="completion_not_taken", remedy=remedy)
    return found
