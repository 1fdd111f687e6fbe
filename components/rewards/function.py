"""Rewards that a user writes: a Python function, or a program in any language."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
from collections.abc import Callable, Sequence
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

# --- A Python function, in a file beside the recipe or in an installed package ---

ARGUMENTS = ("completion", "answer", "row")
"""Keyword arguments that a reward function can ask for."""
SIGNATURE = "write def reward(completion: str, answer, row: dict) -> float; answer and row may be left out"
"""Remedy of errors about the signature of a reward function."""


class FunctionSettings(IsolatedSettings):
    """The reward is the number that a Python function returns."""

    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """MODULE:FUNCTION. The module is a file beside the recipe or in an installed package."""


class Function(Reward[FunctionSettings]):
    """Call the function with the arguments `completion`, `answer` and `row` that its signature names. It may be async.

    The function returns a number or a bool. Any other result or an exception fails the rollout.
    """

    Settings: ClassVar = FunctionSettings
    runs = "process"

    def __init__(self, settings: FunctionSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._function = load_object(settings.function, "function")
        self._arguments = accepted_arguments(self._function, settings.function)

    @staticmethod
    def sources(settings: FunctionSettings) -> dict[str, str]:
        module, _, _ = settings.function.partition(":")
        find_module(module)
        return {"function": code_digest(module)}

    def grade(self, inputs: RewardInput) -> Any:
        value = self._function(**{name: getattr(inputs, name) for name in self._arguments})
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def accepted_arguments(
    function: Callable[..., Any], name: str, offered: Sequence[str] = ARGUMENTS, remedy: str = SIGNATURE
) -> tuple[str, ...]:
    """Return those names in `offered` that `function` accepts as keyword arguments. It has to accept the first one.

    Args:
        name: name of the function in errors.
        remedy: the text of errors that says how the function is written.

    Raises:
        ConfigurationError: `function` is not a function, requires other arguments, or does not accept the first name.

    Example:
        >>> accepted_arguments(lambda completion, answer: float(answer in completion), "rewards:contains")
        ('completion', 'answer')
    """
    parameters = parameters_of(function, name, remedy)
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    required = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    accepted = tuple(each for each in offered if each in names or everything)
    if unknown := [each for each in required if each not in accepted]:
        raise ConfigurationError(
            f"{name!r} requires the argument {unknown[0]!r}, but a reward is called with {', '.join(offered)} only",
            code="unknown_reward_argument",
            remedy=remedy,
        )
    if offered[0] not in accepted:
        raise ConfigurationError(
            f"{name!r} has no argument named {offered[0]}", code="completion_not_taken", remedy=remedy
        )
    return accepted


def parameters_of(function: Callable[..., Any], name: str, remedy: str) -> list[inspect.Parameter]:
    """Return the parameters of a function. `name` and `remedy` are for the error, as in `accepted_arguments`.

    Raises:
        ConfigurationError: `function` is not a function.
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name!r} is not a function: {error}", code="not_a_function", remedy=remedy
        ) from error


# --- A program that reads JSON from its standard input and writes a number to its standard output ---

LONGEST_OUTPUT = 2**16
"""Limit in bytes on what the program may print to its standard output. Longer output cannot be a number."""
LONGEST_ERROR_OUTPUT = 1000
"""Number of bytes of the program's standard error that an error message shows. They are the last ones."""
ERROR_OUTPUT_SECONDS = 1.0
"""Seconds to wait for the rest of standard error after the program has ended: one of its children may hold it open."""


class CommandSettings(IsolatedSettings):
    """The reward is the number that a program prints."""

    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments, run without a shell. A program name with a slash is relative to the recipe's
    folder; other names are looked up on PATH."""
    timeout: PositiveFloat = Field(30.0, le=3600)
    """Seconds that one grade may take. A grade that takes longer fails its rollout."""


class Command(Reward[CommandSettings]):
    """Run the program once per grade, in the recipe's folder, with {"completion": ..., "answer": ..., "row": {...}} on
    its standard input."""

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

    def grade(self, inputs: RewardInput) -> float:
        document = {"completion": inputs.completion, "answer": inputs.answer, "row": inputs.row}
        with TemporaryFile() as stdin:
            stdin.write(json.dumps(document).encode())
            stdin.seek(0)
            error_output, write = _last_bytes()
            try:
                running = Popen(self._command, cwd=self._folder, stdin=stdin, stdout=PIPE, stderr=write)
            finally:
                os.close(write)
            with running:
                assert running.stdout is not None
                output = running.stdout.read(LONGEST_OUTPUT + 1)
                if len(output) > LONGEST_OUTPUT:
                    running.kill()
                    raise RolloutFailed(
                        "reward_invalid", f"the program printed more than {LONGEST_OUTPUT} bytes instead of a number"
                    )
            if running.returncode:
                detail = error_output().decode(errors="replace").strip()
                raise RolloutFailed(
                    "reward_error", f"{self._command[0]} ended with code {running.returncode}: {detail}"
                )
        try:
            return float(output)
        except ValueError:
            shown = output.decode(errors="replace")
            raise RolloutFailed("reward_invalid", f"a number was expected, not {shown!r:.200}") from None


def _last_bytes() -> tuple[Callable[[], bytes], int]:
    """Make a pipe that keeps only the last `LONGEST_ERROR_OUTPUT` bytes written to it.

    A thread reads the pipe all the time, so that a program with much error output never blocks.

    Returns:
        A function that waits for the end of the output and returns its last bytes, and the file descriptor of the
        pipe's writing end.
    """
    read, write = os.pipe()
    last = [b""]

    def work() -> None:
        with open(read, "rb", buffering=0) as stream:  # noqa: PTH123 (a descriptor)
            while part := stream.read(2**16):
                last[0] = (last[0] + part)[-LONGEST_ERROR_OUTPUT:]

    thread = Thread(target=work, daemon=True)
    thread.start()

    def result() -> bytes:
        thread.join(ERROR_OUTPUT_SECONDS)
        return last[0]

    return result, write


def program_path(program: str, folder: Path) -> Path:
    """Return the path of a program. It is relative to `folder` if `program` has a slash, and is searched on PATH if
    not.

    Raises:
        ConfigurationError: there is no such program, or it is not executable.
    """
    beside = "/" in program
    # Links are not followed: the interpreter of a virtual environment is a link, and its path selects the environment.
    path = shutil.which(folder.resolve() / program if beside else program)
    if path is None:
        raise ConfigurationError(
            f"the program {program!r} does not exist or is not executable",
            code="program_missing",
            where=str(folder.resolve()) if beside else "PATH",
            remedy=f"chmod +x {folder / program}" if (folder / program).is_file() else "write it, or correct its name",
        )
    return Path(path)
