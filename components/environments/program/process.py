"""One run of an agent program: a process and a folder of its own, with limits."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from armature.components.contracts.errors import RolloutFailed
from armature.components.machine.process import Program, Scratch

Fault = Literal["timeout", "exit", "output", "no_answer", "bad_answer"]
"""A reason for which a run has no answer.

timeout: it took too long. exit: it ended with another code than 0. output: it printed more than allowed. no_answer: it
did not print an answer or a reward. bad_answer: what it printed is not text, or not a finite reward.
"""
_LIMITED = """
import os, resource, sys
memory, size = map(int, sys.argv[1:3])
for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size), (resource.RLIMIT_CORE, 0)):
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A program that limits itself and becomes the command in its arguments."""
_POLL, _GRACE, _SCANNED = 0.05, 0.5, 2**20


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one run: seconds without waiting for completions, bytes of memory, and bytes of output."""

    seconds: float
    memory: int
    output: int


@dataclass(frozen=True)
class ProgramResult:
    """The end of a run: an answer, a reward of its own, or the fault for which it has neither."""

    answer: str = ""
    reward: float = 0.0
    fault: Fault | None = None


async def run_program(
    command: Sequence[str],
    task: Mapping[str, Any],
    files: Mapping[str, bytes],
    env: Mapping[str, str | None],
    limits: ProgramLimits,
    waited: Callable[[], float],
) -> ProgramResult:
    """Run a command in a folder with `task.json` and `files`, and return its result. In the end the process, all of its
    descendants and the folder are gone.

    Args:
        command: an absolute path and its arguments.
        waited: returns the seconds in which the program waited for completions, which do not count.

    Raises:
        RolloutFailed: `program_not_started`: the process could not be started.
    """
    with Scratch() as scratch:
        folder, log = Path(scratch, "work"), Path(scratch, "output")
        folder.mkdir()
        for name, data in {**files, "task.json": json.dumps(task).encode()}.items():
            (folder / name).write_bytes(data)
        limited = [sys.executable, "-I", "-S", "-c", _LIMITED, str(limits.memory), str(limits.output), *command]
        at_home = {"ARMATURE_TASK": str(folder / "task.json"), "HOME": str(folder), "TMPDIR": str(folder)}
        began = time.monotonic()
        try:
            program = Program(limited, log=log, env={**env, **at_home}, cwd=folder, grace=_GRACE)
        except OSError as error:
            raise RolloutFailed("program_not_started", str(error)) from error
        try:
            while program.returncode is None:
                if time.monotonic() - began - waited() > limits.seconds:
                    return ProgramResult(fault="timeout")
                await asyncio.sleep(_POLL)
        finally:
            program.stop()
        if log.stat().st_size >= limits.output:
            return ProgramResult(fault="output")
        return ProgramResult(fault="exit") if program.returncode else _result(log)


def _result(log: Path) -> ProgramResult:
    """Return what the last line with a JSON object says that has an answer or a reward."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _SCANNED))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            value = json.loads(line) if line.lstrip().startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value.keys() & {"answer", "reward"}:
            break
    else:
        return ProgramResult(fault="no_answer")
    answer, reward = value.get("answer", ""), value.get("reward", 0.0)
    if not isinstance(answer, str):
        answer = json.dumps(answer)
    try:
        answer.encode()
        reward = float(reward) if type(reward) in (bool, int, float) else math.nan
    except (UnicodeEncodeError, OverflowError):
        reward = math.nan
    return ProgramResult(answer, reward) if math.isfinite(reward) else ProgramResult(fault="bad_answer")
