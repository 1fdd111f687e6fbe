"""Damaged inputs at every door: each has to be accepted as what it is, or refused with an error of ours.

A finding is an error of another kind, a changed input that is used without a word, a hang, a death, or memory without
bound. It is shown with the command that repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.fuzz.doors import DOORS
from tests.fuzz.run import fuzz_door, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after about so many seconds")
    parser.add_argument("--inputs", type=int, default=2000, help="how many inputs over all doors")
    parser.add_argument("--seed", default=str(random.randrange(10**6)), help="inputs are a function of it")
    parser.add_argument("--door", choices=DOORS, action="append", help="only this one; may be given several times")
    parser.add_argument("--number", type=int, help="only this input of the one door")
    arguments = parser.parse_args()
    names = arguments.door or [name for name, door in DOORS.items() if door.share]
    shares = max(1, sum(DOORS[name].share for name in names))
    print(f"seed {arguments.seed}", flush=True)
    results, end = {}, time.monotonic() + arguments.seconds
    for place, name in enumerate(names):
        first = arguments.number or 0
        count = 1 if arguments.number is not None else max(1, arguments.inputs * DOORS[name].share // shares)
        left = sum(DOORS[each].share for each in names[place:])
        until = time.monotonic() + (end - time.monotonic()) * DOORS[name].share / left
        results[name] = fuzz_door(name, arguments.seed, range(first, first + count), until)
        for number, kind, detail in results[name].findings:
            print(f"\n{kind}: python -m tests.fuzz --door {name} --seed {arguments.seed} --number {number}\n{detail}")
    print(table(results))
    return int(any(result.findings for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
