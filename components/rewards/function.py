"""Rewards of the user's: a Python function, or a program."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from threading import Thread
from typing import Any, ClassVar

from pydantic import Field, PositiveFloat

from armature.components.artifacts.sources import code_digest, named_files
from armature.components.contracts.errors import ConfigurationError, RolloutFailed
from armature.components.machine.project import find_module, load_object
from armature.components.rewards.reward import IsolatedSettings, Reward, RewardInput

# A function of the user's, in a file beside the recipe or in an installed package.

GIVEN = ("completion", "answer", "row")


class FunctionSettings(IsolatedSettings):
    """The number that a Python function returns."""

    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """MODULE:FUNCTION, of a file beside the recipe or of an installed package."""


class Function(Reward[FunctionSettings]):
    """Calls it by keyword with what it names of `completion`, `answer` and `row`; it may be async.

    It returns a number, or true or false. Whatever else it does costs its rollout.
    """

    Settings: ClassVar = FunctionSettings
    runs = "process"

    def __init__(self, settings: FunctionSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._function = load_object(settings.function, "function")
        self._taken = taken(self._function, settings.function)

    @staticmethod
    def sources(settings: FunctionSettings) -> dict[str, str]:
        module, _, _ = settings.function.partition(":")
        find_module(module)
        return {"function": code_digest(module)}

    def grade(self, given: RewardInput) -> Any:
        value = self._function(**{name: getattr(given, name) for name in self._taken})
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def taken(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """What of `GIVEN` the function takes by keyword.

    Raises:
        ConfigurationError: it is not a function, or takes other arguments.
    """
    remedy = "def reward(completion: str, answer, row: dict) -> float, of which it may leave out what it does not use"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name!r} is not a function: {error}", code="not_a_function", remedy=remedy
        ) from error
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    required = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    found = tuple(each for each in GIVEN if each in names or everything)
    if unknown := [each for each in required if each not in found]:
        raise ConfigurationError(
            f"{name!r} takes {unknown[0]!r}, which a reward is not given", code="unknown_reward_argument", remedy=remedy
        )
    if "completion" not in found:
        raise ConfigurationError(f"{name!r} does not take the completion", code="completion_not_taken", remedy=remedy)
    return found


# A program that grades: JSON on its standard input, a number on its standard output.

LONGEST_OUTPUT = 2**16
"""Bytes that a grade may take; more is not a number."""
LONGEST_COMPLAINT = 1000
"""Bytes of the error output that are shown, the last ones."""
COMPLAINT_SECONDS = 1.0
"""For the rest of the error output, once the program has ended: a child of it may hold it open."""


class CommandSettings(IsolatedSettings):
    """The number that a program prints."""

    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments, without a shell. A program with a slash in its name is beside the recipe, another
    one on PATH."""
    timeout: PositiveFloat = Field(30.0, le=3600)
    """Seconds that one grade may take. The rollout of one that takes longer fails."""


class Command(Reward[CommandSettings]):
    """Runs in the recipe's folder, once for each grade; reads {"completion": ..., "answer": ..., "row": {...}}."""

    Settings: ClassVar = CommandSettings
    runs = "process"

    def __init__(self, settings: CommandSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._folder = folder
        program, *arguments = settings.command
        self._command = [str(program_path(program, folder)), *arguments]

    @staticmethod
    def sources(settings: CommandSettings) -> dict[str, str]:
        return named_files({"command": settings.command})

    def grade(self, given: RewardInput) -> float:
        document = {"completion": given.completion, "answer": given.answer, "row": given.row}
        with TemporaryFile() as asked:
            asked.write(json.dumps(document).encode())
            asked.seek(0)
            complaints, write = _last_bytes()
            try:
                running = Popen(self._command, cwd=self._folder, stdin=asked, stdout=PIPE, stderr=write)
            finally:
                os.close(write)
            with running:
                assert running.stdout is not None
                output = running.stdout.read(LONGEST_OUTPUT + 1)
                if len(output) > LONGEST_OUTPUT:
                    running.kill()
                    raise RolloutFailed(
                        "reward_invalid", f"a number was expected, not more than {LONGEST_OUTPUT} bytes"
                    )
            if running.returncode:
                detail = complaints().decode(errors="replace").strip()
                raise RolloutFailed(
                    "reward_error", f"{self._command[0]} ended with code {running.returncode}: {detail}"
                )
        try:
            return float(output)
        except ValueError:
            shown = output.decode(errors="replace")
            raise RolloutFailed("reward_invalid", f"a number was expected, not {shown!r:.200}") from None


def _last_bytes() -> tuple[Callable[[], bytes], int]:
    """The writing end of a pipe that is always read, and a function that returns the last bytes of what came."""
    read, write = os.pipe()
    last = [b""]

    def work() -> None:
        with open(read, "rb", buffering=0) as stream:  # noqa: PTH123 (a descriptor)
            while part := stream.read(2**16):
                last[0] = (last[0] + part)[-LONGEST_COMPLAINT:]

    thread = Thread(target=work, daemon=True)
    thread.start()

    def result() -> bytes:
        thread.join(COMPLAINT_SECONDS)
        return last[0]

    return result, write


def program_path(program: str, folder: Path) -> Path:
    """
    Raises:
        ConfigurationError: there is no such program, or it is not executable.
    """
    beside = "/" in program
    # Not resolved itself: an interpreter of a virtual environment is a link.
    found = shutil.which(folder.resolve() / program if beside else program)
    if found is None:
        raise ConfigurationError(
            f"there is no program {program!r} that can be run",
            code="program_missing",
            where=str(folder.resolve()) if beside else "PATH",
            remedy=f"chmod +x {folder / program}" if (folder / program).is_file() else "write it, or correct its name",
        )
    return Path(found)
