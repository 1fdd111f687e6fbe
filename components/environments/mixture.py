"""The environment `mixture`: tasks of several environments in one run, mixed by weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from math import ceil
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PositiveFloat, field_validator, model_validator

from armature.components.contracts.episodes import Environment, Episode, Split, Task
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.settings import Settings
from armature.components.contracts.tool_calls import Tools
from armature.components.environments.make import (
    ToolEnvironment,
    environment_sources,
    make_environment,
    refuse_ahead,
)
from armature.components.environments.settings import EnvironmentSettings
from armature.components.machine.hub import COMMIT

PART_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
"""Pattern of names of environments in a mixture. They are part of names of tasks and metrics."""
MOST_REPEATED = 100
"""Largest number of times that tasks are repeated on average so that the weights hold."""


class PartSettings(EnvironmentSettings):
    """An environment of a mixture and its weight. The mixture sets the seed and `evaluation_args` of all of them."""

    weight: PositiveFloat = 1.0
    """Share of the training tasks that are from this environment, relative to the weights of the others."""

    @model_validator(mode="after")
    def _belongs_to_mixture(self) -> Self:
        if self.name == "mixture":
            raise ValueError("a mixture cannot contain a mixture: list its environments here")
        if self.seed or self.evaluation_args:
            raise ValueError("seed and evaluation_args belong to the mixture, not to one of its environments")
        revision = self.args.get("revision")
        if revision is not None and not COMMIT.fullmatch(revision):
            raise ValueError(f"revision is {revision!r}, but a part of a mixture needs a full commit hash")
        return self


class MixtureSettings(Settings):
    """Settings of the environment `mixture`."""

    parts: dict[Annotated[str, Field(pattern=PART_NAME)], PartSettings] = Field(min_length=2)
    """The environments by names of your choice, each with name, args, weight and numbers of tasks."""

    @field_validator("parts")
    @classmethod
    def _in_order(cls, parts: dict[str, PartSettings]) -> dict[str, PartSettings]:
        return dict(sorted(parts.items()))  # tasks depend on the order, which PostgreSQL loses


def interleaved(weights: Mapping[str, float]) -> Iterator[tuple[str, int]]:
    """Yield the tasks of several environments in proportion to their weights, without an end.

    Each task is the name of an environment, and the number of tasks of this environment that came before.

    Example:
        >>> list(islice(interleaved({"charts": 3.0, "dice": 1.0}), 5))
        [('charts', 0), ('charts', 1), ('charts', 2), ('dice', 0), ('charts', 3)]
    """
    numbers = dict.fromkeys(weights, 0)
    while True:
        name = min(weights, key=lambda each: (numbers[each] + 1) / weights[each])
        yield name, numbers[name]
        numbers[name] += 1


def one_pass(sizes: Mapping[str, int], weights: Mapping[str, float]) -> int:
    """Return the number of tasks, give or take one, until each has been listed that the environments have.

    Example:
        >>> one_pass({"charts": 30, "dice": 5}, {"charts": 3.0, "dice": 1.0})
        40
    """
    return max(ceil(size * sum(weights.values()) / weights[name]) for name, size in sizes.items())


@dataclass(frozen=True)
class MixturePart:
    """An environment of a mixture and its weight."""

    environment: Environment
    weight: float = 1.0


class EnvironmentMixture:
    """Tasks of several environments, each with its own prompts, turns and rewards.

    Training tasks are listed in proportion to the weights until each has been listed once. Until then, tasks of other
    environments repeat. Held-out tasks are each listed once, in turn. A task's payload has the name of its environment
    in the field `environment`, by which evaluations break accuracy down.

    Args:
        parts: the environments by name.
        train_tasks: number of training tasks to list; None: until each task has been listed.

    Example:
        >>> from armature.components.environments.colors import Colors, ColorsSettings
        >>> one, two = (Colors(ColorsSettings(), train_tasks=n, heldout_tasks=1, seed=0, processes=1) for n in (1, 2))
        >>> mixture = EnvironmentMixture({"a": MixturePart(one), "b": MixturePart(two)})
        >>> [task.task_id for task in mixture.tasks("train")]
        ['a/colors-train-00000', 'b/colors-train-00000', 'a/colors-train-00000/1', 'b/colors-train-00001']
    """

    name: str = "mixture"
    system_prompt: str | None = None
    dialogue: bool = True

    def __init__(self, parts: Mapping[str, MixturePart], train_tasks: int | None = None) -> None:
        self.parts = dict(sorted(parts.items()))
        self.max_turns = max(part.environment.max_turns for part in self.parts.values())
        # Each episode is graded with the weights of its own environment.
        weights = [each.environment.reward_weights for each in self.parts.values()]
        self.reward_weights: Mapping[str, float] = {name: weight for each in weights for name, weight in each.items()}
        self._train_tasks = train_tasks

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each environment."""
        return {name: part.weight for name, part in self.parts.items()}

    @property
    def drops(self) -> dict[str, int]:
        """Number of rows of data that the environments left out so far, by `environment/reason`."""
        left_out = {name: getattr(part.environment, "drops", {}) for name, part in self.parts.items()}
        return {f"{name}/{reason}": count for name, drops in left_out.items() for reason, count in drops.items()}

    @cached_property
    def _listed(self) -> dict[Split, dict[str, list[Task]]]:
        splits: tuple[Split, ...] = ("train", "heldout")
        return {
            split: {name: list(part.environment.tasks(split)) for name, part in self.parts.items()} for split in splits
        }

    def tasks(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of a split.

        Raises:
            ConfigurationError: an environment has no training tasks, or weights are so uneven that tasks of others
                would repeat endlessly.
        """
        listed = self._listed[split]
        if split == "heldout":
            rounds = zip_longest(*([_named(name, task, 0) for task in tasks] for name, tasks in listed.items()))
            yield from (task for turn in rounds for task in turn if task is not None)
            return
        if missing := [name for name, tasks in listed.items() if not tasks]:
            raise ConfigurationError(
                f"the mixture has no training tasks of {', '.join(missing)}",
                code="mixture_part_empty",
                where="environment.args.parts",
                remedy="leave that environment out",
            )
        weights, sizes = self.weights, {name: len(tasks) for name, tasks in listed.items()}
        if self._train_tasks is None and (length := one_pass(sizes, weights)) > MOST_REPEATED * sum(sizes.values()):
            raise ConfigurationError(
                f"with these weights it takes {length} tasks until each of {sum(sizes.values())} is listed",
                code="mixture_too_uneven",
                where="environment.args.parts",
                remedy="set train_tasks to the number of tasks to list, or choose closer weights",
            )
        left = set(listed)
        for count, (name, number) in enumerate(interleaved(weights)):
            if count == self._train_tasks or (self._train_tasks is None and not left):
                return
            tasks = listed[name]
            yield _named(name, tasks[number % len(tasks)], number // len(tasks))
            if number + 1 == len(tasks):
                left.remove(name)

    def part_of(self, task: Task) -> tuple[str, Environment, Task]:
        """Return the name of the environment that plays `task`, that environment, and the task as it lists it."""
        name, payload = task.payload["environment"], task.payload["task"]
        part_task = Task(payload["task_id"], task.split, payload["payload"])
        return name, self.parts[name].environment, part_task

    def episode(self, task: Task) -> Episode:
        _, environment, part_task = self.part_of(task)
        return environment.episode(part_task)

    def preview(self, task: Task) -> Episode:
        """Return an episode that shows the first observation of `task`."""
        _, environment, part_task = self.part_of(task)
        made: Episode = getattr(environment, "preview", environment.episode)(part_task)
        return made

    def demonstration(self, task: Task) -> list[str]:
        """Return the answers that solve `task`; empty if its environment has no demonstrations."""
        _, environment, part_task = self.part_of(task)
        solve: Any = getattr(environment, "demonstration", lambda task: [])
        return list(solve(part_task))

    def close(self) -> None:
        for part in self.parts.values():
            part.environment.close()


def with_tools(environment: Environment, tools: Tools) -> Environment:
    """Return an environment that offers `tools`. In a mixture, each of its environments does."""
    if isinstance(environment, EnvironmentMixture):
        environment.parts = {
            name: replace(part, environment=with_tools(part.environment, tools))
            for name, part in environment.parts.items()
        }
        return environment
    made: Any = ToolEnvironment(environment, tools)
    return made


def _named(name: str, task: Task, repetition: int) -> Task:
    """Return the mixture's task for a task of the environment `name`, which repeats it for the given time."""
    again = f"/{repetition}" if repetition else ""
    own = {"task_id": task.task_id, "payload": dict(task.payload)}
    return Task(f"{name}/{task.task_id}{again}", task.split, {"environment": name, "task": own})


class MixtureEnvironment(EnvironmentMixture):
    """The mixture that a recipe describes."""

    Settings: ClassVar[type[MixtureSettings]] = MixtureSettings
    knows_its_tasks: ClassVar[bool] = True

    def __init__(
        self,
        settings: MixtureSettings,
        *,
        train_tasks: int | None,
        heldout_tasks: int | None,
        seed: int,
        processes: int,
    ) -> None:
        most = max(1, processes // len(settings.parts))
        parts = {
            name: MixturePart(make_environment(part.model_copy(update={"seed": seed}), most), part.weight)
            for name, part in settings.parts.items()
        }
        super().__init__(parts, train_tasks)
        self._heldout_tasks = heldout_tasks

    def tasks(self, split: Split) -> Iterator[Task]:
        return islice(super().tasks(split), self._heldout_tasks if split == "heldout" else None)

    @staticmethod
    def sources(settings: MixtureSettings) -> dict[str, str]:
        """Return digests of the code and data of all environments, by `environment/source`."""
        each = {name: environment_sources(part) for name, part in settings.parts.items()}
        return {f"{name}/{source}": digest for name, digests in each.items() for source, digest in digests.items()}

    @staticmethod
    def refuse_ahead(settings: MixtureSettings, kind_field: str, most_images: int, most_videos: int) -> None:
        """Check each environment; see `environments.make.refuse_ahead`.

        Raises:
            ConfigurationError: one of them is wrong, or `kind_field` is another field than `environment`.
        """
        if kind_field not in ("", "environment"):
            raise ConfigurationError(
                f"tasks of a mixture have no field {kind_field!r} to break results down by",
                code="unknown_kind_field",
                where="evaluation.kind_field",
                remedy='set it to "environment", or leave it out',
            )
        for part in settings.parts.values():
            refuse_ahead(part, "", most_images, most_videos)
