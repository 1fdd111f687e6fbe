"""Evaluation on a page: how many held-out tasks of an environment does a vision-language model solve?

A vLLM server answers the tasks, the environment rewards the answers, and the share of solved tasks becomes an accuracy
with its 95 % interval. Two cores and no GPU are enough: `python examples/evaluate.py` takes a minute for a tiny model
that guesses. A checkpoint folder and other values of the recipe are arguments:

    python examples/evaluate.py --model path/to/checkpoint environment.name=coordinates evaluation.kind_field=

This script leaves out what `armature run evaluate/vlm` adds: hub names, resuming, tracking and a report.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from armature import (
    EpisodeResult,
    ImageStore,
    ServerPool,
    TerminalEvents,
    accuracy,
    collect,
    collect_results,
    load_recipe,
    make_environment,
    make_tiny_checkpoint,
)


async def evaluate(checkpoint: Path, settings: dict[str, Any], work: Path) -> list[EpisodeResult]:
    """Return one result for each planned episode. A failed episode is not solved, and its result says why."""
    evaluation, machine = settings["evaluation"], settings["machine"]

    # The tasks come from the environment. Those of the held-out split were never trained on.
    environment = make_environment(settings["environment"].for_evaluation())
    by_split = [list(environment.tasks(split)) for split in evaluation.splits]
    tasks = [task for split in by_split for task in split[: evaluation.max_tasks or None]]

    # The pool starts as many vLLM servers as the machine section names, or joins servers that are up. A request that
    # fails on one server is tried on another.
    pool = ServerPool(checkpoint, settings["inference"], machine, log_folder=work / "logs")

    # Each task is played `samples_per_task` times: observations go to a server and its answers to the environment.
    images = ImageStore(work / "images")
    with closing(environment), closing(TerminalEvents()) as events:
        async with pool:
            played = await collect(
                environment,
                tasks,
                evaluation.samples_per_task,
                pool,
                images,
                evaluation.sampling,
                step=0,
                seed=evaluation.seed,
                machine=machine,
                events=events,
            )

    # An episode is solved if it earned `success_reward`. Its kind is a field of the task's payload.
    return collect_results(played, tasks, evaluation.success_reward, evaluation.kind_field)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it a tiny model is made")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="values of evaluate/vlm to change")
    arguments = parser.parse_args()
    settings: dict[str, Any] = dict(load_recipe("evaluate/vlm", arguments.overrides).sections)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as folder:
        model, work = settings["model"], Path(folder)
        checkpoint = arguments.model or make_tiny_checkpoint(
            model.tiny_family, work / "model", model.tiny.seed, model.tiny
        )
        results = asyncio.run(evaluate(checkpoint, settings, work))

    # The interval is Wilson's, widened because samples of one task are not independent trials.
    for kind in sorted({result.kind for result in results}):
        episodes = [result for result in results if result.kind == kind]
        print(f"{kind:<12} {accuracy(episodes)}  of {len(episodes)}")
    print(f"{'accuracy':<12} {accuracy(results)}  of {len(results)}")
    if failures := [result.failure for result in results if result.failure]:
        print(f"{len(failures)} episodes failed and count as not solved: {', '.join(sorted(set(failures)))}")


if __name__ == "__main__":
    main()
