"""`armature reproduce`: run the command behind a number in the documentation, and compare.

The numbers stand in `docs/numbers.toml`. A test holds the pages equal to this table.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.installation import CHECKOUT
from armature.components.machine.process import Scratch

TABLE = "docs/numbers.toml"


class QuotedNumber(BaseModel):
    """A measured number that a page of the documentation quotes.

    Attributes:
        page: the page's file, and `text` the words in it that contain the value and its interval.
        value: the measured value, or the lower end if the page names a range.
        low, high: limits of the 95 % interval or of the range; equal to the value if the page names none.
        command: shell command that measures it, in an empty folder; "" if it needs more than a command.
        reads: regular expression whose one group is the value in the command's output.
        block: language of a block of code of the page, which is put into the folder as `block.py` or `block.toml`.
        hardware: machine on which it was measured.
        commit: commit of the repository at which it was measured; "" if that is not known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    page: str
    text: str
    value: float
    low: float
    high: float
    command: str
    reads: str = ""
    block: str = ""
    hardware: str
    commit: str = ""


def read_numbers() -> dict[str, QuotedNumber]:
    """Return the numbers of the documentation by name.

    Raises:
        ConfigurationError: this is not a checkout of the repository.
    """
    if CHECKOUT is None:
        raise ConfigurationError(
            "an installed wheel has no table of numbers",
            code="checkout_missing",
            where=TABLE,
            remedy="clone the repository, and run the command there",
        )
    table = tomllib.loads((CHECKOUT / TABLE).read_text())
    return {name: QuotedNumber.model_validate(values) for name, values in table.items()}


def selected(names: Sequence[str], numbers: dict[str, QuotedNumber]) -> dict[str, QuotedNumber]:
    """Return the numbers with these names. For the name of a group, return the numbers in it that a command measures.

    Raises:
        ConfigurationError: there is no such number or group, or no command measures it.
    """
    measured = {each: number for each, number in numbers.items() if number.reads}
    for name in names:
        if not any(f"{each}/".startswith(f"{name}/") for each in measured):
            raise ConfigurationError(
                "no command measures a number of this name",
                code="number_unknown",
                where=f"{name} in {TABLE}",
                remedy="`armature reproduce` lists the names, and the numbers that are measured by hand",
            )
    return {each: measured[each] for each in measured if any(f"{each}/".startswith(f"{name}/") for name in names)}


def listed(numbers: dict[str, QuotedNumber]) -> Iterator[str]:
    """Yield a line for each number."""
    width = max(map(len, numbers))
    for name, number in numbers.items():
        command = number.command if number.reads else f"by hand: {number.command or number.page}"
        yield f"{name:<{width}}  {number.value:g} [{number.low:g}, {number.high:g}]  {number.hardware}  {command}"


def reproduce(names: Sequence[str]) -> None:
    """List the numbers of the documentation, or measure those with these names again.

    Raises:
        ConfigurationError: see `selected` and `read_numbers`.
        ArmatureError: a command fails, or a value is outside of its interval.
    """
    numbers = read_numbers()
    if not names:
        print("\n".join(listed(numbers)))
        return
    outputs: dict[tuple[str, str, str], str] = {}
    outside = []
    for name, number in selected(names, numbers).items():
        key = number.command, number.page if number.block else "", number.block
        if key not in outputs:
            outputs[key] = _output(number)
        value = read_value(number, outputs[key])
        if value == number.value:
            verdict = "equal"
        elif number.low <= value <= number.high:
            verdict = "within the interval"
        else:
            verdict = "outside of the interval"
            outside.append(name)
        print(f"{name}: {value:g}, {number.page} has {number.value:g} [{number.low:g}, {number.high:g}]: {verdict}")
    if outside:
        raise ArmatureError(f"outside of the interval: {', '.join(outside)}", code="number_not_reproduced", where=TABLE)


def read_value(number: QuotedNumber, output: str) -> float:
    """Return the value in the last place of a command's output that the number's expression matches.

    Raises:
        ArmatureError: the output has no such place.
    """
    matches = re.findall(number.reads, output, re.MULTILINE)
    if not matches:
        raise ArmatureError(
            "the output of the command has no such value",
            code="number_missing",
            where=f"{number.reads} in the output of: {number.command}",
            remedy=f"correct `reads` in {TABLE}",
        )
    return float(matches[-1])


def _output(number: QuotedNumber) -> str:
    """Run a number's command in an empty folder, show its output, and return it."""
    assert CHECKOUT is not None
    with Scratch() as folder:
        if number.block:
            page = (CHECKOUT / number.page).read_text()
            block = re.findall(rf"^```{number.block}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
            suffix = {"python": "py"}.get(number.block, number.block)
            Path(folder, f"block.{suffix}").write_text(block)
        Path(folder, ".venv-vllm").symlink_to(CHECKOUT / ".venv-vllm")
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = os.environ | {"PATH": programs, "PYTHONPATH": str(CHECKOUT)}
        print(f"$ {number.command}", flush=True)
        lines = []
        with subprocess.Popen(
            ["bash", "-c", f"set -e; {number.command}"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
    if process.returncode:
        raise ArmatureError(
            f"the command failed with exit code {process.returncode}",
            code="command_failed",
            where=shlex.quote(number.command),
            remedy="its output is above",
        )
    return "".join(lines)
