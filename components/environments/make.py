"""From settings to an environment."""

from __future__ import annotations

from armature.components.contracts.episodes import Environment
from armature.components.cpus import available_cpus
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
