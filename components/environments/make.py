"""Make an environment from its settings, and digest the code and data that it depends on."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

from armature.components.artifacts.sources import code_digest, named_files
from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.errors import ArmatureError, ConfigurationError, said
from armature.components.contracts.machine import available_cpus
from armature.components.contracts.tool_calls import Tools
from armature.components.contracts.value_text import value_text
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.generated import GeneratedEnvironment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.tools.box import ToolBox, tool_sources


def make_environment(settings: EnvironmentSettings, processes: int = 0) -> Environment:
    """Return the environment that `settings` describe.

    Args:
        settings: the environment's name and arguments.
        processes: number of processes that the environment may start; 0 means half the number of CPU cores.

    Raises:
        ConfigurationError: no environment has that name, or a package that it needs is not installed.

    Example:
        >>> settings = EnvironmentSettings(name="colors", train_tasks=2, heldout_tasks=1)
        >>> [task.task_id for task in make_environment(settings).tasks("train")]
        ['colors-train-00000', 'colors-train-00001']
    """
    factory = ENVIRONMENTS[settings.name]
    processes = processes or max(1, available_cpus() // 2)
    tools = _tools(settings, processes)
    environment: Any = factory(
        factory.Settings.model_validate(settings.args),
        train_tasks=settings.train_tasks,
        heldout_tasks=settings.heldout_tasks,
        seed=settings.seed,
        processes=processes,
    )
    return environment if tools is None else ToolEnvironment(environment, tools)


def _tools(settings: EnvironmentSettings, processes: int) -> ToolBox | None:
    """Return the tools of an environment; None without tools.

    Raises:
        ConfigurationError: a tool cannot be loaded or has no schema, or the environment is a mixture.
    """
    if not settings.tools:
        return None
    if settings.name == "mixture":
        raise ConfigurationError(
            "a mixture has no tools, but each of its environments can have some",
            code="tools_of_mixture",
            where="environment.tools",
            remedy='move them: [environment.args.parts.NAME] with tools = ["zoom"]',
        )
    factory = ENVIRONMENTS[settings.name]
    arguments = factory.Settings.model_validate(settings.args)
    if getattr(factory, "own_tools", getattr(arguments, "own_tools", False)):
        raise ConfigurationError(
            f"the environment {settings.name!r} offers tools of its own",
            code="tools_of_program",
            where="environment.tools",
            remedy="leave tools out; offer them where the others are, in the program or the server",
        )
    return ToolBox(
        settings.tools, max_calls=settings.max_tool_calls, timeout=settings.tool_timeout, processes=processes
    )


class ToolEnvironment:
    """An environment with tools; otherwise it is the environment that it was made of."""

    def __init__(self, environment: Environment, tools: Tools) -> None:
        self._environment, self.tools = environment, tools

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def close(self) -> None:
        """Close the environment and its tools."""
        try:
            self._environment.close()
        finally:
            self.tools.close()


def refuse_ahead(settings: EnvironmentSettings, kind_field: str, most_images: int, most_videos: int) -> None:
    """Check what can be known of an environment without its data.

    Its class may say in `most_videos` how many videos a prompt shows, and have a static method `refuse_ahead`, which is
    called with the same arguments.

    Args:
        settings: the environment's name and arguments.
        kind_field: field of the tasks by which an evaluation breaks accuracy down; "" for no breakdown.
        most_images: largest number of images in a prompt that the servers accept.
        most_videos: largest number of videos in a prompt that they accept.

    Raises:
        ConfigurationError: a run with these settings would fail.
    """
    factory, tools = ENVIRONMENTS[settings.name], _tools(settings, 1)
    if tools is not None:
        tools.close()
    if (shown := getattr(factory, "most_videos", 0)) > most_videos:
        raise ConfigurationError(
            f"servers accept {most_videos} videos in a prompt, fewer than the environment {settings.name!r} shows",
            code="too_many_videos",
            where="inference.max_videos_per_prompt",
            remedy=f"set inference.max_videos_per_prompt = {shown}",
        )
    if hasattr(factory, "refuse_ahead"):
        factory.refuse_ahead(factory.Settings.model_validate(settings.args), kind_field, most_images, most_videos)


def first_task(settings: EnvironmentSettings) -> Task | None:
    """Return the first held-out task of a `GeneratedEnvironment`, or None for other environments, which may take long.

    Raises:
        ConfigurationError: the environment cannot be made, or raises when it makes the task.
    """
    factory = ENVIRONMENTS[settings.name]
    if not (isinstance(factory, type) and issubclass(factory, GeneratedEnvironment)):
        return None
    try:
        with closing(make_environment(settings, 1)) as environment:
            return next(iter(environment.tasks("heldout")), None)
    except ArmatureError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"the first task cannot be made: {said(error)}",
            code="tasks_not_listed",
            where=f"environment {settings.name!r}, split 'heldout'",
        ) from error


def environment_sources(settings: EnvironmentSettings) -> dict[str, str]:
    """Return digests of what tasks and rewards depend on besides the settings: the environment's code and its data.

    An environment's class may digest its data itself, in a static method `sources(settings)` that returns digests by
    name. Without that method the data are the files and folders that the arguments name. The digests are the same on
    every machine that has the same code and data.

    Raises:
        ConfigurationError: no environment has that name, or its code cannot be found.
    """
    factory = ENVIRONMENTS[settings.name]
    sources = getattr(factory, "sources", None)
    data = sources(factory.Settings.model_validate(settings.args)) if sources else named_files(settings.args)
    return {"code": code_digest(factory.__module__), **data, **tool_sources(settings.tools)}


def at_commit(settings: EnvironmentSettings, say: Callable[[str], None]) -> EnvironmentSettings:
    """Return the settings with the branch or tag in `revision` replaced by the commit that it points to now.

    An environment whose settings have a `revision` implements this in a static method `at_commit(settings, say)`;
    other environments' settings are returned unchanged. `say` receives messages for the user.

    Raises:
        ConfigurationError: no environment has that name.
        DataError: see `hub_commit`.
    """
    factory = ENVIRONMENTS[settings.name]
    resolve = getattr(factory, "at_commit", None)
    if resolve is None:
        return settings
    resolved = resolve(factory.Settings.model_validate(settings.args), say)
    return settings.model_copy(update={"args": resolved.model_dump(mode="json")})


def evaluated_sources(settings: EnvironmentSettings) -> dict[str, str]:
    """Return `environment_sources` of the settings, and of the settings for evaluation with the prefix
    `evaluation/`."""
    played = environment_sources(settings.for_evaluation()).items()
    return environment_sources(settings) | {f"evaluation/{name}": digest for name, digest in played}


def task_kind(task: Task, field: str) -> str:
    """Return the kind of a task as text: the value of `field` in its payload, or "all" if `field` is empty.

    Raises:
        ConfigurationError: the payload has no such field.
    """
    if not field:
        return "all"
    if field not in task.payload:
        raise ConfigurationError(
            f"the tasks have no field {field!r} to break results down by",
            code="unknown_kind_field",
            where=f"evaluation.kind_field, task {task.task_id}",
            remedy=f"choose one of {', '.join(sorted(task.payload))}, or leave it empty",
        )
    value = task.payload[field]
    return json.dumps(value) if value is None or isinstance(value, list | dict) else value_text(value)
