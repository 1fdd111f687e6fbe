"""The environment `verifiers`: its settings, its tasks and the choice of interface."""

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
from armature.components.environments.gateway.episode import GatewayEpisode
from armature.components.environments.gateway.server import REFUSAL_WEIGHTS, ChatGateway, refusal_parts
from armature.components.environments.guarded import LoopThread, SharedThreadEpisode
from armature.components.environments.verifiers.source import Row, VerifiersSource


class VerifiersSettings(Settings):
    """Settings of the environment `verifiers`: the package to load and the interface of verifiers that it uses."""

    interface: Literal["legacy", "v1"]
    """legacy for load_environment with datasets and rubrics (verifiers 0.1.9 to 0.3); v1 for tasksets (0.4)."""
    id: str = Field(min_length=1)
    """Package of the environment or taskset."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of load_environment (legacy), or the env section (v1), such as {agent = {harness = {...}}}."""
    max_turns: PositiveInt
    """Turns after which an episode ends and is scored."""


class VerifiersEnvironment:
    """An environment of the package verifiers, which computes the reward. Its parts and metrics have weight 0.

    A task refers to its row by position and content, so a change of the dataset is noticed. If the environment has no
    rows for evaluation, both splits are drawn from its training rows; they never share a row.
    """

    name: ClassVar[str] = "verifiers"
    Settings: ClassVar[type[VerifiersSettings]] = VerifiersSettings

    system_prompt: ClassVar[None] = None
    dialogue: ClassVar[bool] = True
    own_tools: ClassVar[bool] = True

    def __init__(
        self, settings: VerifiersSettings, *, train_tasks: int, heldout_tasks: int, seed: int, processes: int
    ) -> None:
        del processes  # episodes are coroutines in one thread, because they share clients and locks of one event loop
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
        self.reward_weights: dict[str, float] = {"reward": 1.0, **REFUSAL_WEIGHTS}

    @staticmethod
    def sources(settings: VerifiersSettings) -> dict[str, str]:
        """Return versions and digests of the environment's packages and files.

        Data that the environment loads from elsewhere, such as a dataset of a hub, are not included.
        """
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
        shuffled = [(index, train[index]) for index in order]
        others = shuffled[counts["train"] :]
        if heldout is not None:
            order = np.random.default_rng((self._seed, 1)).permutation(len(heldout)).tolist()
            others = [(index, heldout[index]) for index in order]
        return {"train": shuffled[: counts["train"]], "heldout": others[: counts["heldout"]]}

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
        """Return the episode of a task.

        Raises:
            DataError: the environment's row has changed since the task was made.
        """
        rows = self._rows[task.split]
        number = task.payload["number"]
        if number >= len(rows) or rows[number][1].identity != task.payload["identity"]:
            raise DataError(
                f"row {task.payload['row']} of the environment has changed since the task was made",
                code="row_changed",
                where=task.task_id,
                remedy="install the version of the environment that made the tasks, or make the tasks again",
            )
        row = rows[number][1]

        async def play(base_url: str, gateway: ChatGateway) -> Mapping[str, float]:
            parts = await self._source.play(row, base_url, gateway.key) | refusal_parts(gateway.refused)
            for name in parts:
                self.reward_weights.setdefault(name, 0.0)
            return parts

        return SharedThreadEpisode(GatewayEpisode(play), self._thread)


def _source(settings: VerifiersSettings) -> VerifiersSource:
    if settings.interface == "legacy":
        from armature.components.environments.verifiers.legacy import LegacySource

        return LegacySource(settings.id, settings.args, settings.max_turns)
    from armature.components.environments.verifiers.v1 import V1Source

    return V1Source(settings.id, settings.args, settings.max_turns)
