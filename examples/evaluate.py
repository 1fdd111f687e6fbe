"""Evaluation on a page: how many held-out tasks of an environment does a vision-language model solve?

A vLLM server answers the tasks, the environment rewards the answers, and the number of solved ones becomes an accuracy
with its 95 % interval. `armature run evaluate/vlm` is the same with resume, tracking and a report. Two cores and no GPU
are enough: `python examples/evaluate.py`, about a minute, for a tiny model that guesses. Others, and other values of
the recipe:

    python examples/evaluate.py --model Qwen/Qwen2-VL-2B-Instruct --revision main inference.max_model_len=4096
    python examples/evaluate.py --model path/to/checkpoint environment.name=coordinates evaluation.kind_field=
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import armature
from armature.components.artifacts.images import ImageStore
from armature.components.configuration.stages import TerminalEvents
from armature.components.environments.make import make_environment
from armature.components.evaluation.results import EpisodeResult, accuracy, by_kind, collect_results, failures_said
from armature.components.inference.pool import ServerPool
from armature.components.models.source import locate
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.rollouts.collect import collect


async def evaluate(checkpoint: Path, settings: dict[str, Any], work: Path) -> list[EpisodeResult]:
    """One result for each episode that was planned; one that failed is not solved, and says why."""
    plan, machine, events = settings["evaluation"], settings["machine"], TerminalEvents()

    # The tasks: the environment's own, with what determines each of them; held-out ones were never trained on.
    environment = make_environment(settings["environment"].for_evaluation())
    listed = [list(environment.tasks(split)) for split in plan.splits]
    tasks = [task for split in listed for task in split[: plan.max_tasks or None]]

    # The servers: as many as the machine has, or those at machine.endpoints. A request that fails is tried on another.
    pool = ServerPool(checkpoint, settings["inference"], machine, log_folder=work / "logs")

    # Every task `samples_per_task` times: observations go to a server, its answers to the environment, until the end.
    images, options = ImageStore(work / "images"), {"step": 0, "seed": plan.seed, "machine": machine, "events": events}
    with closing(environment), closing(events):
        async with pool:
            played = await collect(environment, tasks, plan.samples_per_task, pool, images, plan.sampling, **options)

    # An episode is solved if it earned `success_reward`. Its kind is a field of the task's payload.
    return collect_results(played, tasks, plan.success_reward, plan.kind_field)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, artifact or hub name; without it a tiny model is made")
    parser.add_argument("--revision", help="commit, tag or branch of a hub name")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="values of evaluate/vlm to change")
    given = parser.parse_args()
    settings = dict(armature.load_recipe("evaluate/vlm", given.overrides).sections)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as folder:
        if given.model:
            checkpoint = locate(given.model, given.revision)
        else:
            tiny: Any = settings["model"]
            checkpoint = make_tiny_checkpoint(tiny.tiny_family, Path(folder) / "model", tiny.tiny.seed, tiny.tiny)
        results = asyncio.run(evaluate(checkpoint, settings, Path(folder)))

    # Wilson's interval; samples of one task count for as much as they vary, not as independent trials.
    for kind, group in sorted(by_kind(results).items()):
        print(f"{kind:<12} {accuracy(group)}  of {len(group)}")
    print(f"{'accuracy':<12} {accuracy(results)}  of {len(results)}")
    print(failures_said(results))


if __name__ == "__main__":
    main()
