"""From settings to an environment."""

from __future__ import annotations

from collections.abc import Callable

from armature.components.artifacts.sources import code_digest, named_files
from armature.components.contracts.episodes import Environment
from armature.components.contracts.machine import available_cpus
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.settings import EnvironmentSettings


def make_environment(settings: EnvironmentSettings, processes: int = 0) -> Environment:
    """The environment that `settings` describe. It may start `processes` processes; 0: half as many as cores.

    Raises:
        ConfigurationError: no environment has that name, or an extra that it needs is not installed.
    """
    factory = ENVIRONMENTS[settings.name]
    environment: Environment = factory(
        factory.Settings.model_validate(settings.args),
        train_tasks=settings.train_tasks,
        heldout_tasks=settings.heldout_tasks,
        seed=settings.seed,
        processes=processes or max(1, available_cpus() // 2),
    )
    return environment


# What an environment's tasks and rewards depend on besides its settings: its code, and the data that it reads.
#
# A class of environments may say its data itself, by a static method `sources(settings)` that maps names to digests;
# without one, they are the files and folders that its arguments name.


def environment_sources(settings: EnvironmentSettings) -> dict[str, str]:
    """Digests by name, the same on every machine that has the same code and data.

    Raises:
        ConfigurationError: no environment has that name, or its code cannot be found.
    """
    factory = ENVIRONMENTS[settings.name]
    own = getattr(factory, "sources", None)
    said = own(factory.Settings.model_validate(settings.args)) if own else named_files(settings.args)
    return {"code": code_digest(factory.__module__), **said}


def at_commit(settings: EnvironmentSettings, say: Callable[[str], None]) -> EnvironmentSettings:
    """With a commit in place of the branch or tag `revision` of its arguments.

    A class of environments that has one says how, by a static method `at_commit(settings, say)`.

    Raises:
        ConfigurationError: no environment has that name.
        DataError: see `hub_commit`.
    """
    factory = ENVIRONMENTS[settings.name]
    own = getattr(factory, "at_commit", None)
    if own is None:
        return settings
    resolved = own(factory.Settings.model_validate(settings.args), say)
    return settings.model_copy(update={"args": resolved.model_dump(mode="json")})


def evaluated_sources(settings: EnvironmentSettings) -> dict[str, str]:
    """`environment_sources`, and those of the environment as an evaluation plays it."""
    played = environment_sources(settings.for_evaluation()).items()
    return environment_sources(settings) | {f"evaluation/{name}": digest for name, digest in played}
