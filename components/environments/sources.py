"""What an environment's tasks and rewards depend on besides its settings: its code, and the data that it reads.

A class of environments may say its data itself, by a static method `sources(settings)` that maps names to digests;
without one, they are the files and folders that its arguments name.
"""

from __future__ import annotations

from components.environments import ENVIRONMENTS
from components.environments.code import code_digest
from components.environments.data import named_files
from components.environments.settings import EnvironmentSettings


def environment_sources(settings: EnvironmentSettings) -> dict[str, str]:
    """Digests by name, the same on every machine that has the same code and data.

    Raises:
        ConfigurationError: no environment has that name, or its code cannot be found.
    """
    factory = ENVIRONMENTS[settings.name]
    own = getattr(factory, "sources", None)
    said = own(factory.Settings.model_validate(settings.args)) if own else named_files(settings.args)
    return {"code": code_digest(factory.__module__), **said}
