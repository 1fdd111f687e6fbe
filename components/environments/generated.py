"""The base of environments whose tasks are drawn from a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from armature.components.contracts.episodes import Episode, Split, Task
from armature.components.contracts.settings import Settings

SettingsT = TypeVar("SettingsT", bound=Settings)


def task_seed(seed: int, split: Split, index: int) -> int:
    """A seed of its own for every task: even in the training split, odd in the held-out one, never twice."""
    return 2 * ((seed << 32) + index) + (split == "heldout")


class GeneratedEnvironment(ABC, Generic[SettingsT]):
    """An environment that makes `train_tasks` and `heldout_tasks` tasks from `seed`."""

    name: str
    Settings: ClassVar[type[Settings]]
    system_prompt: str | None = None
    dialogue: bool = True
    max_turns: int
    reward_weights: Mapping[str, float]

    def __init__(self, settings: SettingsT, *, train_tasks: int, heldout_tasks: int, seed: int, processes: int) -> None:
        self.settings = settings
        self.processes = processes
        self._counts = {"train": train_tasks, "heldout": heldout_tasks}
        self._seed = seed

    def tasks(self, split: Split) -> Iterator[Task]:
        for index in range(self._counts[split]):
            payload = self.payload(task_seed(self._seed, split, index), index)
            yield Task(f"{self.name}-{split}-{index:05d}", split, payload)

    @abstractmethod
    def payload(self, seed: int, index: int) -> dict[str, Any]:
        """What determines task `index`, as JSON; `seed` is the task's own."""

    def close(self) -> None:
        """Nothing was started."""

    @abstractmethod
    def episode(self, task: Task) -> Episode: ...
