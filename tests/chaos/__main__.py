"""Short trainings that are killed, paused, cut off and denied disk, against one that is left alone.

Each has to end with the weights of the undisturbed run, or to stop with an error of ours and to end with these weights
when it is started again.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import Chaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=30, help="how many disturbed runs")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the first run")
    parser.add_argument("--folder", type=Path, help="where; a new folder goes unless a run fails")
    arguments = parser.parse_args()
    made = arguments.folder is None or not arguments.folder.exists()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"in {folder}", flush=True)
    with Chaos(folder) as chaos:
        print(f"undisturbed: weights {chaos.expected}", flush=True)
        failed = 0
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            report = chaos.disturb(seed)
            failed += not report.passed
            print(report, flush=True)
    if made and not failed:
        shutil.rmtree(folder)
    print(f"{arguments.runs - failed} of {arguments.runs} runs ended with the weights of the undisturbed one")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
