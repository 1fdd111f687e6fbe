"""The environment `program`: its settings, and an episode for each row of a table."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from armature.components.artifacts.sources import code_digest, named_files
from armature.components.contracts.episodes import EarlierMessage, Episode, Observation, Task
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.images import EncodedImage
from armature.components.environments.dataset.environment import DatasetEnvironment, DatasetEpisode
from armature.components.environments.dataset.settings import DatasetEnvironmentSettings
from armature.components.environments.dataset.template import parse_template
from armature.components.environments.gateway.episode import GatewayEpisode
from armature.components.environments.gateway.server import REFUSAL_WEIGHTS, ChatGateway, refusal_parts
from armature.components.environments.program.process import Fault, ProgramLimits, ProgramResult, run_program
from armature.components.machine.project import VARIABLE as PROJECT
from armature.components.machine.project import load_object, project_folder, project_path
from armature.components.machine.workers.process import importable
from armature.components.rewards.callables import CallableReward
from armature.components.rewards.make import reward_columns
from armature.components.rewards.reward import RewardSettings

REPORTED = "program_reward"
"""Column in which rewards find the reward that the program printed."""


class ProgramSettings(DatasetEnvironmentSettings):
    """Settings of the environment `program`: a table of tasks, as of `dataset`, and the program that solves them."""

    command: tuple[str, ...] = ()
    """Program and its arguments; arguments that are files beside the recipe are passed as absolute paths."""
    function: str = Field("", pattern=r"^$|^[\w.]+:[\w.]+$")
    """Function to call in a process of its own in place of a command: MODULE:FUNCTION."""
    max_turns: PositiveInt = 16
    """Completions that one run may ask for. Further requests get an error."""
    timeout: PositiveFloat = Field(300.0, le=86400)
    """Seconds that one run may take. Waiting for completions does not count."""
    max_memory: PositiveInt = 4 * 2**30
    """Bytes of address space of each process of the program."""
    max_output: PositiveInt = 16 * 2**20
    """Largest output of the program in bytes, and the largest file that it may write."""
    program_weight: float = 0.0
    """Weight of the reward that the program itself prints."""
    rewards: tuple[RewardSettings, ...] = ()
    """Rewards that grade the program's answer, by name and weight; their rows have its reward as program_reward."""

    @model_validator(mode="after")
    def _check_program(self) -> Self:
        if bool(self.command) == bool(self.function):
            raise PydanticCustomError("command_or_function", "set exactly one of command and function")
        if not self.rewards and not self.program_weight:
            raise PydanticCustomError("nothing_graded", "set rewards, or program_weight for the program's own reward")
        return self


def program(completion: str, row: Mapping[str, Any]) -> float:
    """Return the reward that the program printed."""
    return float(row[REPORTED])


class ProgramEnvironment(DatasetEnvironment):
    """An environment that runs a program for each rollout of a row.

    The program gets the row's prompt, its images, and the columns that do not give the answer away. A run without an
    answer gets the reward 0, with the reason as a reward part such as `program_timeout`; one that never asked for a
    completion is a failed rollout.
    """

    name: ClassVar[str] = "program"
    Settings: ClassVar[type[ProgramSettings]] = ProgramSettings
    own_tools: ClassVar[bool] = True
    settings: ProgramSettings

    def __init__(self, settings: ProgramSettings, **counts: Any) -> None:
        reported = CallableReward(program, weight=settings.program_weight)
        super().__init__(settings, callables=[reported], **counts)
        faults = {f"program_{fault}": 0.0 for fault in get_args(Fault)}
        self.reward_weights = {**self.reward_weights, **faults, **REFUSAL_WEIGHTS}
        self.max_turns = settings.max_turns
        self._command = command_of(settings)

    @staticmethod
    def sources(settings: DatasetEnvironmentSettings) -> dict[str, str]:
        """Return the sources of a dataset, and digests of the program's code: its module, or files of the command."""
        assert isinstance(settings, ProgramSettings)
        module = settings.function.partition(":")[0]
        code = code_digest(module) if module else named_files({"command": settings.command}).get("data", "")
        return {**DatasetEnvironment.sources(settings), "program": code}

    @staticmethod
    def refuse_ahead(settings: DatasetEnvironmentSettings, kind_field: str, most_images: int, most_videos: int) -> None:
        """Check the program, and all that a dataset checks; see `environments.make.refuse_ahead`.

        Raises:
            ConfigurationError: the program does not exist, or a function cannot be loaded.
        """
        assert isinstance(settings, ProgramSettings)
        command_of(settings)
        if settings.function:
            load_object(settings.function, "program")
        if settings.rewards:
            DatasetEnvironment.refuse_ahead(settings, kind_field, most_images, most_videos)

    def demonstration(self, task: Task) -> list[str]:
        """Return nothing: only the program knows what it asks the model."""
        return []

    def preview(self, task: Task) -> Episode:
        """Return an episode that shows the task without running the program."""
        return self.row_episode(task)

    def episode(self, task: Task) -> Episode:
        """Return the episode of a task.

        Raises:
            DataError: the row has changed since the task was made.
        """
        shown = self.row_episode(task)

        async def play(base_url: str, gateway: ChatGateway) -> Mapping[str, float]:
            observation = await shown.reset()
            document, files = self._document(task, observation, shown.row)
            env = {
                **importable(),
                PROJECT: str(project_folder().resolve()),
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_KEY": gateway.key,
                "NO_PROXY": "127.0.0.1",
                "no_proxy": "127.0.0.1",
                "VLLM_API_KEY": None,  # it could change the policy
            }
            limits = ProgramLimits(self.settings.timeout, self.settings.max_memory, self.settings.max_output)
            result = await run_program(self._command, document, files, env, limits, lambda: gateway.waited)
            return await self._graded(shown, result) | refusal_parts(gateway.refused)

        return GatewayEpisode(play, self.settings.max_turns)

    def _document(
        self, task: Task, observation: Observation, row: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the task as the program reads it, and the files of its images."""
        files: dict[str, bytes] = {}
        messages = []
        for message in (*observation.earlier, EarlierMessage("user", observation.content)):
            parts = []
            for part in message.content:
                if isinstance(part, EncodedImage):
                    name = f"image-{len(files)}.{part.media_type.partition('/')[2]}"
                    files[name] = part.data
                    parts.append({"type": "image", "image": name})
                else:
                    parts.append({"type": "text", "text": part})
            messages.append({"role": message.role, "content": parts})
        prompt = "".join(part for part in observation.content if isinstance(part, str))
        hidden = hidden_columns(self.settings)
        shown = {name: value for name, value in row.items() if name not in hidden}
        document = {"id": task.task_id, "prompt": prompt, "images": list(files), "messages": messages, "row": shown}
        return document, files

    async def _graded(self, shown: DatasetEpisode, result: ProgramResult) -> dict[str, float]:
        if result.fault is not None:
            return {**dict.fromkeys(self._rewards.weights, 0.0), f"program_{result.fault}": 1.0}
        return await shown.grade(result.answer, {**shown.row, REPORTED: result.reward})


def hidden_columns(settings: ProgramSettings) -> set[str]:
    """Return the columns that a program does not get: they hold the answer, or are what rewards compare with it."""
    asked = {
        name
        for text in (settings.prompt, settings.system)
        for column in parse_template(text).columns
        for name in column.names
    }
    solved = {name for column in parse_template(settings.demonstration).columns for name in column.names}
    graded = {*solved, *reward_columns(settings.rewards)} - asked
    return {settings.answer, settings.conversation, *graded}


def command_of(settings: ProgramSettings) -> list[str]:
    """Return the command of a program, with absolute paths.

    Raises:
        ConfigurationError: there is no such program.
    """
    if settings.function:
        return [sys.executable, "-m", "armature.components.environments.program.function", settings.function]
    name, *arguments = settings.command
    path = project_path(name)
    located = shutil.which(path if os.sep in name else name)
    if located is None:
        raise ConfigurationError(
            f"there is no program {name!r}",
            code="program_missing",
            where="environment.args.command",
            remedy="install it, or name an executable file beside the recipe with a slash: ./agent.sh",
        )
    placed = [str(project_path(each).resolve()) if project_path(each).is_file() else each for each in arguments]
    return [os.path.abspath(located), *placed]  # noqa: PTH100 (links of interpreters are not resolved)
