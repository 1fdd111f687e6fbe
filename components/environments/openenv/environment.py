"""An OpenEnv server as one of our environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from armature.components.contracts.episodes import Episode, Split, Task
from armature.components.contracts.secrets import resolve
from armature.components.environments.generated import GeneratedEnvironment
from armature.components.environments.openenv.episode import OpenEnvEpisode
from armature.components.environments.openenv.server import LocalServer
from armature.components.environments.openenv.settings import OpenEnvSettings
from armature.components.sources.data import named_files

SEEDS = 2**31
SPACING = 1_000_003
"""Between the first tasks of two seeds."""


class OpenEnvEnvironment(GeneratedEnvironment[OpenEnvSettings]):
    """A task is a seed of the server's reset. The reward is the server's own."""

    name = "openenv"
    Settings: ClassVar[type[OpenEnvSettings]] = OpenEnvSettings

    def __init__(
        self, settings: OpenEnvSettings, *, train_tasks: int, heldout_tasks: int, seed: int, processes: int
    ) -> None:
        super().__init__(settings, train_tasks=train_tasks, heldout_tasks=heldout_tasks, seed=seed, processes=processes)
        self.system_prompt = settings.system_prompt
        self.max_turns = settings.max_turns
        self.reward_weights = {"reward": 1.0}
        self._headers: dict[str, str] = {}
        if settings.api_key is not None:
            key = resolve({"api_key": settings.api_key}, "environment.args")["api_key"]
            self._headers["Authorization"] = f"Bearer {key}"
        self._server = LocalServer(settings.command, settings.start_timeout) if settings.command else None

    @staticmethod
    def sources(settings: OpenEnvSettings) -> dict[str, str]:
        """The code of a server counts where `command` names its file; for another one there is `revision`."""
        return named_files({"command": settings.command, "reset": settings.reset})

    def tasks(self, split: Split) -> Iterator[Task]:
        """Seeds below 2**31, as numpy's older generators take them: even ones train, odd ones are held out."""
        for index in range(self._counts[split]):
            seed = (2 * (self._seed * SPACING + index) + (split == "heldout")) % SEEDS
            yield Task(f"openenv-{split}-{index:05d}", split, {"seed": seed})

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return {"seed": seed}

    def episode(self, task: Task) -> Episode:
        url = self._server.url() if self._server is not None else str(self.settings.base_url)
        return OpenEnvEpisode(self.settings, url, self._headers, task.payload["seed"])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
