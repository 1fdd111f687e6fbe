"""A verifiers environment as one of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt

from armature.components.artifacts.sources import code_digest, has_code, named_files, versions
from armature.components.contracts.episodes import Episode, Split, Task
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.installation import install_command
from armature.components.contracts.settings import Settings
from armature.components.environments.guarded import LoopThread, SharedThreadEpisode
from armature.components.environments.verifiers.episode import Row, VerifiersEpisode, VerifiersSource


class VerifiersSettings(Settings):
    """Which verifiers environment, and through which of its two interfaces."""

    interface: Literal["legacy", "v1"]
    """legacy: load_environment with datasets and rubrics (0.1.9 to 0.3); v1: tasksets (0.4)."""
    id: str = Field(min_length=1)
    """The environment's or the taskset's package."""
    args: dict[str, Any] = Field(default_factory=dict)
    """legacy: arguments of load_environment; v1: the env section, e.g. {agent = {harness = {...}}}."""
    max_turns: PositiveInt
    """Turns after which an episode is ended and scored."""


class VerifiersEnvironment:
    """The reward is the environment's own, its parts and metrics are recorded with weight 0.

    Tasks name rows by position and content, so a data set that changes is noticed. Both splits are drawn from
    the training rows where the environment has no others for evaluation; they never share a row.
    """

    name: ClassVar[str] = "verifiers"
    Settings: ClassVar[type[VerifiersSettings]] = VerifiersSettings

    dialogue: ClassVar[bool] = True

    def __init__(
        self, settings: VerifiersSettings, *, train_tasks: int, heldout_tasks: int, seed: int, processes: int
    ) -> None:
        del processes  # its episodes are coroutines, all in one thread: they share clients and locks of one loop
        if find_spec("verifiers") is None:
            raise ConfigurationError(
                "environment 'verifiers' needs the package verifiers",
                code="package_missing",
                remedy=install_command("verifiers"),
            )
        self._source: VerifiersSource = _source(settings)
        self._counts = {"train": train_tasks, "heldout": heldout_tasks}
        self._seed = seed
        self.max_turns = self._source.max_turns
        self.reward_weights: dict[str, float] = {"reward": 1.0}

    @staticmethod
    def sources(settings: VerifiersSettings) -> dict[str, str]:
        """What the environment loads by name from elsewhere, such as a data set of a hub, is not among them."""
        module = settings.id.partition(":")[0].replace("-", "_")
        code = {"environment": code_digest(module)} if has_code(module) else {}
        return versions("verifiers", settings.id) | named_files(settings.args) | code

    @cached_property
    def _rows(self) -> dict[Split, list[tuple[int, Row]]]:
        train, heldout = self._source.rows()
        counts = self._counts
        need = {"train": counts["train"] + (0 if heldout else counts["heldout"]), "heldout": counts["heldout"]}
        for split, rows in (("train", train), ("heldout", heldout)):
            if rows is not None and len(rows) < need[split]:
                raise ConfigurationError(
                    f"{need[split]} rows are requested and the environment has {len(rows)}",
                    code="too_few_rows",
                    where=f"{split}_tasks",
                    remedy=f"lower train_tasks = {counts['train']} or heldout_tasks = {counts['heldout']}",
                )
        order = np.random.default_rng((self._seed, 0)).permutation(len(train)).tolist()
        picked = [(index, train[index]) for index in order]
        if heldout is None:
            return {"train": picked[: counts["train"]], "heldout": picked[counts["train"] : need["train"]]}
        others = np.random.default_rng((self._seed, 1)).permutation(len(heldout)).tolist()
        return {
            "train": picked[: counts["train"]],
            "heldout": [(index, heldout[index]) for index in others[: counts["heldout"]]],
        }

    @cached_property
    def system_prompt(self) -> str | None:
        return self._rows["train"][0][1].system_prompt

    def tasks(self, split: Split) -> Iterator[Task]:
        for number, (index, row) in enumerate(self._rows[split]):
            payload = {"number": number, "row": index, "identity": row.identity}
            yield Task(f"verifiers-{split}-{number:05d}", split, payload)

    @cached_property
    def _thread(self) -> LoopThread:
        return LoopThread("verifiers")

    def close(self) -> None:
        if "_thread" in self.__dict__:
            self.__dict__.pop("_thread").end()

    def episode(self, task: Task) -> Episode:
        """
        Raises:
            DataError: the environment's rows are not those that the task was made from.
        """
        rows = self._rows[task.split]
        number = task.payload["number"]
        if number >= len(rows) or rows[number][1].identity != task.payload["identity"]:
            raise DataError(
                f"row {task.payload['row']} of the environment is not the one that the task was made from",
                code="row_changed",
                where=task.task_id,
                remedy="install the version of the environment that made the tasks, or make the tasks again",
            )
        row = rows[number][1]

        async def play(base_url: str) -> Mapping[str, float]:
            parts = await self._source.play(row, base_url)
            for name in parts:
                self.reward_weights.setdefault(name, 0.0)
            return parts

        return SharedThreadEpisode(VerifiersEpisode(play, self.system_prompt), self._thread)


def _source(settings: VerifiersSettings) -> VerifiersSource:
    if settings.interface == "legacy":
        from armature.components.environments.verifiers.legacy import LegacySource

        return LegacySource(settings.id, settings.args, settings.max_turns)
    from armature.components.environments.verifiers.v1 import V1Source

    return V1Source(settings.id, settings.args, settings.max_turns)
