"""A robot policy that learns by trying, from its demonstrations to its evaluations, over several seeds, on a GPU.

`python -m benchmarks.robot_rl_gpu RECIPE --seeds 0 1 2` runs the stages of `train-vla-rl` without Prefect. Imitation on
demonstrations is made once, if the recipe has it; a seed is one of rollouts and updates. Processes with the same store
share the evaluation before the training, so that seeds can run side by side.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from armature.components.configuration import Recipe, load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.robots.evaluation.stage import COMPARISON_FILE, METRICS_FILE


class Chain:
    """Runs the stages of a recipe and records the seconds that each stage takes."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.seconds: dict[str, float] = {}

    def run(self, name: str, **inputs: Artifact) -> Artifact:
        settings, machine = self.recipe.settings_for(STAGES[name].settings), self.recipe.sections["machine"]
        assert isinstance(machine, Machine)
        began = time.perf_counter()
        made = run_stage(name, settings, inputs, machine)
        self.seconds[name] = time.perf_counter() - began
        return made

    def imitation(self) -> Artifact:
        """Return the policy before reinforcement learning: the recipe's, after its imitation if it has one."""
        start = self.run("policy")
        if self.recipe.sections.get("training") is None:
            return start
        data = self.run("demonstrations")
        return self.run("train-vla", policy=start, dataset=data, statistics=self.run("quantile-stats", dataset=data))


def read(artifact: Artifact, name: str) -> Any:
    """Return the contents of an artifact's JSON file."""
    return json.loads((artifact.path / name).read_text())


def measure(name: str, seeds: Sequence[int], changes: Sequence[str]) -> list[dict[str, Any]]:
    """Return an entry for the policy before reinforcement learning, and one entry for the training with each seed."""
    first = Chain(load_recipe(name, changes))
    start = first.imitation()
    before = first.run("evaluate-libero", policy=start)
    result = [{"before": True, "metrics": read(before, METRICS_FILE), "seconds": first.seconds}]
    print(json.dumps(result[-1]), flush=True)
    for seed in seeds:
        ours = [f"rollouts.seed={seed}", f"trainer.seed={seed}"]
        chain = Chain(load_recipe(name, [*changes, *ours]))
        trained = chain.run("train-vla-rl", policy=start)
        after, history = chain.run("evaluate-libero", policy=trained), read(trained, "history.json")
        compared = read(chain.run("compare-libero", first=before, second=after), COMPARISON_FILE)
        entry = {
            "seed": seed,
            "metrics": read(after, METRICS_FILE),
            "comparison": compared,
            "seconds": chain.seconds,
            "history": history,
        }
        result.append(entry)
        print(json.dumps({**entry, "history": [round(row["reward"], 2) for row in history]}), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="train-vla-rl/spatial-small")
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="of rollouts and updates; none: imitation alone"
    )
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", help="a JSON file for all of it")
    arguments = parser.parse_args()
    result = measure(arguments.recipe, arguments.seeds, arguments.changes)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
