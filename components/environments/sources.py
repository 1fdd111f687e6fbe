"""What an environment's tasks and rewards depend on besides its settings: its code, and the data that it reads.

A class of environments may say its data itself, by a static method `sources(settings)` that maps names to digests;
without one, they are the files and folders that its arguments name.
"""

from __future__ import annotations

from collections.abc import Callable

from armature.components.environments import ENVIRONMENTS
from armature.components.environments.settings import EnvironmentSettings
from armature.components.sources.code import code_digest
from armature.components.sources.data import named_files


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
