"""Damaged inputs at one door, in a process of its own: one JSON line each, written before and after."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

from armature.components.contracts.errors import ArmatureError
from tests.fuzz.doors import DOORS, Attempt, Silent

GROWTH = 2**20
"""Most KiB by which one input may raise the process's peak memory. More is a finding."""


def peak_kib() -> int:
    """Return the peak memory of this process in KiB. `ru_maxrss` would include the parent process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


def outcome(attempt: Attempt, rng: random.Random) -> tuple[str, str]:
    """Run one input. Return its result, such as "accepted", and the details if the result is a finding."""
    before = peak_kib()
    try:
        result = "accepted" if attempt(rng) else "refused"
    except ArmatureError:
        result = "refused"
    except Silent as error:
        return "silent", str(error)
    except BaseException:
        return "raw", traceback.format_exc(limit=-6)
    grown = peak_kib() - before
    return ("memory", f"{grown >> 10} MiB") if grown > GROWTH else (result, "")


def main(name: str, seed: str, first: int, stop: int) -> None:
    """Run the inputs with the numbers from `first` to `stop` (exclusive), and write their results as lines of JSON. An
    input depends only on the door, the seed and its number."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is not ours to read

    def say(**document: object) -> None:
        print(json.dumps(document), file=lines)

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, DOORS[name].open(Path(folder)) as attempt:
        for number in range(first, stop):
            say(begin=number)
            kind, detail = outcome(attempt, random.Random(f"{seed}/{name}/{number}"))
            say(end=number, kind=kind, detail=detail)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
