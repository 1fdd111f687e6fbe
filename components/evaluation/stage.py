"""The stage `evaluate`: a checkpoint plays every task of some splits; results, metrics and a report are written."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import Task
from armature.components.contracts.errors import DataError
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.environments.stage import load_environment, sources_of_tasks
from armature.components.evaluation.results import (
    EpisodeResult,
    accuracy,
    by_kind,
    collect_results,
    describe_failures,
    mean_reward,
    metrics,
    of_split,
    planned_tasks,
    refuse_unfinished,
    split_metrics,
    write_results,
)
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.pages.records import token_decoder
from armature.components.pages.report import HtmlReport, Rollouts, Table, write_report
from armature.components.rollouts.collect import collect
from armature.components.rollouts.table import write_rollouts

# --- The report ---

COLUMNS = ("episodes", "failed", "accuracy, 95 % interval", "mean reward", "mean turns")
"""Columns of the report's tables, after the name of the row."""
PER_EPISODE = {
    "turns": "turns per episode",
    "turns_when_solved": "turns when solved",
    "format_errors": "unreadable answers per episode",
    "inadmissible_actions": "inadmissible actions per episode",
}
"""Labels of metrics per episode that the report shows if they are not 0."""


def evaluation_report(
    title: str,
    results: Sequence[EpisodeResult],
    splits: Sequence[str],
    configuration: Mapping[str, Any],
    rollouts: Rollouts,
) -> HtmlReport:
    """Return the report of an evaluation: accuracy and reward with 95 % intervals, by split, kind of task and part of
    the reward, and the number of failures by reason.

    Numbers without the name of a split belong to the first split.
    """
    first = of_split(results, splits[0])
    numbers = split_metrics(first)
    figures = {
        "accuracy, 95 % interval": str(accuracy(first)),
        "mean reward, 95 % interval": str(mean_reward(first)),
        "tasks": f"{numbers['tasks']:,}",
        "episodes": f"{numbers['episodes']:,}",
        "failed, counted as not solved": f"{numbers['failed']:,}",
    }
    if numbers["failed"] and numbers["failed"] < numbers["episodes"]:
        figures["accuracy of finished episodes"] = f"{numbers['accuracy_of_finished']:.3f}"
    figures |= {label: f"{numbers[key]:.2f}" for key, label in PER_EPISODE.items() if numbers.get(key)}
    tables = [_splits(results, splits), *(_kinds(results, split, splits) for split in splits)]
    tables += [_parts(numbers["reward_parts"]), _failures(results)]
    return HtmlReport(
        title,
        figures,
        tables=[table for table in tables if table],
        configuration=configuration,
        rollouts=rollouts,
    )


def _splits(results: Sequence[EpisodeResult], splits: Sequence[str]) -> Table | None:
    """Table of accuracy and reward by split; None if there is only one split."""
    if len(splits) < 2:
        return None
    rows = [_row(split, of_split(results, split)) for split in splits]
    return Table("By split", ["split", *COLUMNS], rows)


def _kinds(results: Sequence[EpisodeResult], split: str, splits: Sequence[str]) -> Table | None:
    """Table of accuracy and reward by kind of task; None if there is only one kind."""
    kinds = by_kind(of_split(results, split))
    if len(kinds) < 2:
        return None
    title = "By kind of task" if len(splits) == 1 else f"By kind of task, {split}"
    return Table(title, ["kind", *COLUMNS], [_row(kind, group) for kind, group in sorted(kinds.items())])


def _row(name: str, group: Sequence[EpisodeResult]) -> list[object]:
    """Cells of a row: its name, then the values of `COLUMNS`."""
    done = [result.turns for result in group if result.failure is None]
    turns = f"{fmean(done):.1f}" if done else ""
    failed = str(len(group) - len(done))
    return [name, str(len(group)), failed, accuracy(group), f"{mean_reward(group).estimate:.3f}", turns]


def _parts(parts: Mapping[str, float]) -> Table | None:
    """Table of the mean of each part of the reward; None if there are no parts."""
    rows = [[name, f"{value:.4f}"] for name, value in parts.items()]
    return Table("Reward by part", ["part", "mean"], rows) if rows else None


def _failures(results: Sequence[EpisodeResult]) -> Table | None:
    """Table of the number of failed episodes by reason; None if none failed."""
    reasons = Counter(result.failure for result in results if result.failure)
    rows = [[reason, str(count)] for reason, count in reasons.most_common()]
    return Table("Episodes that could not be finished", ["reason", "count"], rows) if rows else None


# --- The stage ---

METRICS_FILE = "metrics.json"


def checkpoint_folder(model: Artifact) -> Path:
    """Return the Hugging Face folder in the artifact of a model or of a training run.

    Raises:
        DataError: the artifact has no checkpoint.
    """
    from armature.components.models.source import locate

    folder = locate(model.path)
    if not (folder / "config.json").is_file():
        raise DataError(
            "not a checkpoint: no config.json",
            code="not_a_checkpoint",
            where=str(folder),
            remedy="pass the output of stage `model` or of a training",
        )
    return folder


def evaluate(
    settings: EvaluateStageSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Play the evaluation and write `results.parquet`, `metrics.json`, `report.html` and the rollouts.

    Raises:
        ConfigurationError: a task has no field `evaluation.kind_field`.
        ServerError: no episode could be finished.
    """
    plan = settings.evaluation
    tasks = planned_tasks(plan, inputs["tasks"].path)
    checkpoint = checkpoint_folder(inputs["model"])
    images = ImageStore(context.images)
    outputs = asyncio.run(play(settings, tasks, inputs["tasks"].path, checkpoint, images, context))
    refuse_unfinished(outputs)
    results = collect_results(outputs, tasks, plan.success_reward, plan.kind_field)
    numbers = metrics(results, plan.splits)
    for split in plan.splits:
        if failures := describe_failures(of_split(results, split)):
            context.events.message(f"{split}: {failures}")
    write_rollouts(out, outputs)
    write_results(out, results)
    (out / METRICS_FILE).write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n")
    rollouts = Rollouts(outputs.trajectories, outputs.failures, images, token_decoder(checkpoint))
    title = f"Evaluation of {outputs.trajectories[0].environment}, {' and '.join(plan.splits)}"
    configuration = settings.model_dump(mode="json")
    page = evaluation_report(title, results, plan.splits, configuration, rollouts)
    write_report(out / "report.html", page)
    context.events.metrics({name: value for name, value in numbers.items() if isinstance(value, int | float)}, 0)
    return StageReport(rows={"tasks": len(tasks), "episodes": len(results)}, drops=outputs.drops)


async def play(
    settings: EvaluateStageSettings,
    tasks: Sequence[Task],
    tasks_folder: Path,
    checkpoint: Path,
    images: ImageStore,
    context: StageContext,
) -> GenerateOutputs:
    """Play every task `samples_per_task` times, on model servers that are started for this evaluation or already
    running."""
    from armature.components.inference.pool import ServerPool

    plan = settings.evaluation
    pool = ServerPool(checkpoint, settings.inference, context.machine, log_folder=context.workspace / "logs")
    processes = context.machine.workers.environments
    with closing(load_environment(tasks_folder, processes, evaluation=True)) as environment:
        async with pool:
            return await collect(
                environment,
                tasks,
                plan.samples_per_task,
                pool,
                images,
                plan.sampling,
                step=0,
                seed=plan.seed,
                machine=context.machine,
                events=context.events,
            )


EVALUATE_STAGE = Stage("evaluate", 6, EvaluateStageSettings, ("tasks", "model"), evaluate, sources_of_tasks)
"""The stage that measures a checkpoint on all tasks of some splits."""
