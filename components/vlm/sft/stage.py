"""The stage `sft` (warm start): trains a model on demonstrations of an environment's tasks and writes a checkpoint."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import DataError
from armature.components.contracts.metrics import write_json
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.environments.stage import sources_of_tasks
from armature.components.vlm.settings import SFTSettings, WarmStartSettings

KIND = "demonstrations"


def warm_start(settings: SFTSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext) -> StageReport:
    """Run the stage: play or find demonstrations, train on them, and write the results to `out`.

    It writes `checkpoint/` (Hugging Face layout), `history.json`, `metrics.json`, `lineage.json` and `report.html`.

    Raises:
        ConfigurationError: the environment has no demonstrations.
        DataError: none of the demonstrations can be trained on.
    """
    from armature.components.artifacts.images import ImageStore
    from armature.components.artifacts.json_lines import History
    from armature.components.models.adapters import get_adapter
    from armature.components.models.load import load_processor
    from armature.components.models.source import CHECKPOINT, locate
    from armature.components.rollouts.table import read_rollouts
    from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
    from armature.components.vlm.sft.fit import EpochSampler, fit

    plan = settings.warm_start
    weights = locate(inputs["model"].path, settings.model.revision)
    processor = load_processor(weights, settings.model)
    played = demonstrations(plan, processor, inputs, context)
    outputs = read_rollouts(played.path)
    adapter = get_adapter(weights, processor, ImageStore(context.images).open, plan.max_sequence_tokens)
    samples, drops = adapter.samples(_split(outputs, "train"))
    heldout, _ = adapter.samples(_split(outputs, "heldout"))
    drops.update(outputs.drops)
    if not samples:
        raise DataError(
            f"none of the demonstrations can be trained on; dropped: {dict(drops)}",
            code="no_demonstration_usable",
            where=str(played.path),
            remedy="read the detail of the first failure in failures.parquet in this folder",
        )
    steps = EpochSampler(samples, plan.epochs, plan.samples_per_step, plan.seed)
    policy = TrainerPolicySettings(
        model_path=weights,
        model=settings.model,
        trainer=plan.trainer(steps.steps),
        temperature=1.0,
        images=context.images,
    )
    history = History(context.workspace / "history.jsonl")
    with TrainerClient(policy, context.machine, context.workspace / "trainer", context.saved) as trainer:
        fit(trainer, steps, heldout, plan.save_every, history, context.events, out / CHECKPOINT)
    rows = history.read()
    write_json(out / "history.json", rows)
    write_json(out / "lineage.json", [{"step": 0, KIND: played.digest}])
    write_json(out / "metrics.json", summary(rows))
    write_pages(out, settings, outputs, rows, context.images)
    counts = {KIND: len(outputs.trajectories), "samples": len(samples), "steps": steps.steps}
    return StageReport(rows=counts, drops=dict(drops))


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


def summary(history: list[dict[str, float]]) -> dict[str, float]:
    """Return figures from the history: mean loss and probability at the end of the training, and held-out losses.

    The means are over the last tenth of the steps. Held-out losses are from before and after the training.
    """
    from armature.components.vlm.sft.fit import HELDOUT_LOSS

    trained = history[1:]
    tail = trained[-max(1, len(trained) // 10) :]
    numbers = {key: sum(row[key] for row in tail) / len(tail) for key in ("loss", "probability")}
    measured = [row[HELDOUT_LOSS] for row in history if HELDOUT_LOSS in row]
    if measured:
        numbers |= {"heldout_loss_before": measured[0], "heldout_loss": measured[-1]}
    return numbers


def write_pages(
    folder: Path, settings: SFTSettings, outputs: GenerateOutputs, history: list[dict[str, float]], images: Path
) -> None:
    """Write the page `report.html` to `folder`."""
    from armature.components.artifacts.images import ImageStore
    from armature.components.models.source import CHECKPOINT
    from armature.components.pages.records import token_decoder
    from armature.components.pages.report import Rollouts
    from armature.components.pages.training import write_training_report

    numbers = summary(history)
    figures = {KIND: f"{len(outputs.trajectories):,}"}
    if "heldout_loss" in numbers:
        figures["held-out loss, nats per token"] = (
            f"{numbers['heldout_loss_before']:.4g} before, {numbers['heldout_loss']:.4g} after"
        )
    dropped = Counter(failure.reason for failure in outputs.failures)
    figures |= {f"left out: {reason}": f"{count:,}" for reason, count in sorted(dropped.items())}
    write_training_report(
        folder,
        title=f"Warm start of {settings.model.source} on {outputs.trajectories[0].environment}",
        history=history,
        configuration=settings.model_dump(mode="json"),
        figures=figures,
        rollouts=Rollouts(
            outputs.trajectories, outputs.failures, ImageStore(images), token_decoder(folder / CHECKPOINT)
        ),
    )


def _split(outputs: GenerateOutputs, split: str) -> GenerateOutputs:
    return GenerateOutputs([trajectory for trajectory in outputs.trajectories if trajectory.split == split])


SFT_STAGE = Stage("sft", 4, SFTSettings, ("tasks", "model"), warm_start, sources_of_tasks)
