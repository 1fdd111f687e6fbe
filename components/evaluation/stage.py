"""The stage evaluate: a checkpoint plays every task of some splits, and what it earned is written down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import Task
from armature.components.contracts.errors import DataError
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.environments.stage import load_environment, sources_of_tasks
from armature.components.evaluation.page import evaluation_report
from armature.components.evaluation.planned import planned_tasks
from armature.components.evaluation.results import (
    collect_results,
    failures_said,
    metrics,
    of_split,
    refuse_unfinished,
    write_results,
)
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.reports.records import token_decoder
from armature.components.reports.report import Rollouts, write_report
from armature.components.rollouts.collect import collect
from armature.components.rollouts.table import write_rollouts

METRICS_FILE = "metrics.json"


def checkpoint_folder(model: Artifact) -> Path:
    """The Hugging Face folder of a model artifact, or of a training run's artifact.

    Raises:
        DataError: there is no checkpoint in it.
    """
    from armature.components.models.source import locate

    folder = locate(model.path)
    if not (folder / "config.json").is_file():
        raise DataError(
            "not a checkpoint: no config.json",
            code="not_a_checkpoint",
            where=str(folder),
            remedy="give the model stage's output",
        )
    return folder


def evaluate(
    settings: EvaluateStageSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Writes `results.parquet`, `metrics.json`, `report.html` and the rollout table.

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
        if failures := failures_said(of_split(results, split)):
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
    """Every task `samples_per_task` times, on servers that are started for it or joined."""
    from armature.components.inference.pool import ServerPool

    plan = settings.evaluation
    pool = ServerPool(checkpoint, settings.inference, context.machine, log_folder=context.workspace / "logs")
    processes = context.machine.environment_processes
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


EVALUATE_STAGE = Stage("evaluate", 5, EvaluateStageSettings, ("tasks", "model"), evaluate, sources_of_tasks)
