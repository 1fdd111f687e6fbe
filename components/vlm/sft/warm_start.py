"""The stage `warm-start`: trains a model on demonstrations of an environment's tasks and writes a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.environments.stage import sources_of_tasks
from armature.components.vlm.settings import WarmStartSettings, WarmStartStageSettings

KIND = "demonstrations"


def warm_start(
    settings: WarmStartStageSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Run the stage: play or find demonstrations, and train on them; see `train_on`.

    Raises:
        ConfigurationError: the environment has no demonstrations.
        DataError: none of the demonstrations can be trained on.
    """
    from armature.components.models.load import load_processor
    from armature.components.models.source import locate
    from armature.components.vlm.sft.supervised import train_on

    weights = locate(inputs["model"].path, settings.model.revision)
    played = demonstrations(settings.warm_start, load_processor(weights, settings.model), inputs, context)
    return train_on(played, settings, settings.model, settings.warm_start, weights, out, context)


def demonstrations(
    plan: WarmStartSettings, processor: Any, inputs: Mapping[str, Artifact], context: StageContext
) -> Artifact:
    """Return the artifact with the demonstrations' rollout tables, training tasks first; play them if it is missing."""
    from armature.components.artifacts.images import ImageStore
    from armature.components.artifacts.manifest import write_manifest
    from armature.components.configuration.stages import open_store
    from armature.components.environments.stage import load_environment, load_tasks
    from armature.components.rollouts.table import write_rollouts
    from armature.components.vlm.sft.demonstrate import PromptWriter, demonstrate, expert, one_thread

    store, key = open_store(context.machine), context.fingerprint
    if made := store.find(KIND, key):
        return made
    train = load_tasks(inputs["tasks"].path, "train")
    heldout = load_tasks(inputs["tasks"].path, "heldout")[: plan.heldout_demonstrations]
    tasks = [*train[: plan.demonstrations or len(train)], *heldout]

    def report(finished: int) -> None:
        context.events.progress(KIND, finished, len(tasks))

    processes = context.machine.workers.environments
    with one_thread(), closing(load_environment(inputs["tasks"].path, processes)) as environment:
        outputs = asyncio.run(
            demonstrate(
                expert(environment),
                tasks,
                plan.success_reward,
                PromptWriter(processor),
                ImageStore(context.images),
                context.machine,
                report,
            )
        )
    if outputs.failures:
        first = outputs.failures[0]
        context.events.message(
            f"{len(outputs.failures)} of {len(tasks)} demonstrations are dropped: {outputs.drops}; "
            f"the first one is task {first.task_id}: {first.detail[:200]}"
        )

    def fill(folder: Path) -> None:
        write_rollouts(folder, outputs)
        write_manifest(
            folder,
            kind=KIND,
            kind_version=1,
            rows={"trajectories": len(outputs.trajectories), "failures": len(outputs.failures)},
            drops=outputs.drops,
            inputs={name: artifact.digest for name, artifact in inputs.items()},
            settings={"run": key},
        )

    artifact = store.write(KIND, key, fill)
    context.events.artifact(artifact, "output", 0)
    return artifact


WARM_START_STAGE = Stage("warm-start", 1, WarmStartStageSettings, ("tasks", "model"), warm_start, sources_of_tasks)
