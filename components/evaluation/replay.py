"""Replay of some episodes of a bundle by servers of the same policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import Task
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import StageContext
from armature.components.environments.stage import load_environment
from armature.components.evaluation.bundle import EpisodeClaim
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.rollouts.collect import collect
from armature.components.rollouts.play import RolloutId


async def replay(
    settings: EvaluateStageSettings,
    tasks: Sequence[Task],
    tasks_folder: Path,
    checkpoint: Path,
    chosen: Sequence[EpisodeClaim],
    context: StageContext,
) -> tuple[GenerateOutputs, bool]:
    """Play the chosen episodes of an evaluation again, with the requests of the evaluation.

    Returns:
        The rollouts, and True if the servers were found to be deterministic.
    """
    from armature.components.inference.pool import ServerPool

    plan = settings.evaluation
    pool = ServerPool(checkpoint, settings.inference, context.machine, log_folder=context.workspace / "logs")
    processes = context.machine.workers.environments
    with closing(load_environment(tasks_folder, processes, evaluation=True)) as environment:
        async with pool:
            outputs = await collect(
                environment,
                tasks,
                plan.samples_per_task,
                pool,
                ImageStore(context.images),
                plan.sampling,
                step=0,
                seed=plan.seed,
                machine=context.machine,
                events=context.events,
                only={RolloutId.parse(each.result.trajectory_id) for each in chosen},
            )
    return outputs, pool.repeatability.promised
