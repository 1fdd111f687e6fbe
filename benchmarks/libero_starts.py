"""Starts of LIBERO's tasks, with the installed MuJoCo and LIBERO's own meshes.

Each task is reset to some of its stored states. A line per reset tells how far the objects have moved sideways and
tilted when they have come to rest, after falling (as in LIBERO) and as Armature plays it, and what of the task's start
does not hold. `python -m benchmarks.libero_starts starts.jsonl --states 0 7` takes four seconds of a core per task.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

import mujoco

from armature.components.robots.libero.settings import SimulatorSettings, Suite
from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.starts import displacements, object_poses
from armature.components.robots.libero.tasks import suite_tasks

SEED = 1000
"""Seed of the positions of fixtures; an evaluation's default for episode 0."""

if not hasattr(mujoco, "mj_copyData"):  # before 3.5; it copies states for images, which are not drawn here
    mujoco.mj_copyData = lambda *_: None


def starts(suite: str, index: int, states: list[int]) -> list[dict[str, Any]]:
    """Return one record per stored state of a task."""
    task = suite_tasks(suite)[index]
    simulator = LiberoSimulator(task, SimulatorSettings(), broken_starts=True)
    records = []
    for state in states:
        record = {"mujoco": mujoco.__version__, "suite": suite, "task": index, "name": task.name, "state": state}
        for name, lower in (("falling", False), ("lowered", True)):
            _, broken = simulator._settle(state, SEED, lower=lower)
            changes = displacements(simulator.stored, object_poses(simulator._environment))
            record[name] = {
                "broken": broken,
                "moved_cm": max((100 * moved, each) for each, (moved, _) in changes.items()),
                "tilted_degrees": max((tilted, each) for each, (_, tilted) in changes.items()),
            }
            if not broken:
                break
        records.append(record)
    simulator.close()
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--states", type=int, nargs="+", default=[0])
    parser.add_argument("--suites", nargs="+", choices=get_args(Suite), default=get_args(Suite))
    arguments = parser.parse_args()
    records = []
    with arguments.out.open("w") as out:
        for suite in arguments.suites:
            for task in suite_tasks(suite):
                new = starts(suite, task.index, arguments.states)
                out.writelines(json.dumps(record) + "\n" for record in new)
                out.flush()
                records += new
    for name in ("falling", "lowered"):
        broken = [record for record in records if name in record and record[name]["broken"]]
        tasks = {(record["suite"], record["task"]) for record in broken}
        print(f"{name}: {len(broken)} of {len(records)} starts are broken, in {len(tasks)} tasks")
        for record in broken:
            print(f"  {record['suite']} {record['task']}, state {record['state']}: {'; '.join(record[name]['broken'])}")


if __name__ == "__main__":
    main()
