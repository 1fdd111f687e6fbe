"""Supervised training on the answers of trajectories, which demonstrators or the user's conversations provide.

The stage `sft` trains on conversations. The stage `warm-start` calls the same function, `train_on`, on demonstrations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from armature.components.contracts.errors import DataError
from armature.components.contracts.metrics import last_tenth, write_json
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.settings import Settings
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.models.settings import ModelSettings
from armature.components.vlm.settings import SupervisedSettings
from armature.components.vlm.sft.settings import DPOSettings, SupervisedStageSettings

HELDOUT = ("loss", "token_accuracy", "reward_margin", "pair_accuracy", "chosen_likelier")
"""Metrics of held-out samples that the summary has, as far as the loss has them. The loss is in nats: of a token, or
of a pair."""


def train_on(
    played: Artifact,
    settings: Settings,
    model: ModelSettings,
    plan: SupervisedSettings,
    weights: Path,
    out: Path,
    context: StageContext,
    dpo: DPOSettings | None = None,
) -> StageReport:
    """Train on the trajectories in the artifact `played`, or on pairs of them, and write the results to `out`.

    It writes `checkpoint/` (Hugging Face layout), `history.json`, `metrics.json`, `lineage.json` and `report.html`.

    Args:
        settings: the stage's settings, for the report.
        weights: folder of the model to begin with.

    Raises:
        DataError: none of the trajectories can be trained on.
    """
    from armature.components.artifacts.images import ImageStore
    from armature.components.artifacts.json_lines import History
    from armature.components.models.adapters import get_adapter
    from armature.components.models.load import load_processor
    from armature.components.models.source import CHECKPOINT
    from armature.components.rollouts.table import read_rollouts
    from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
    from armature.components.vlm.sft.fit import AnswerLoss, EpochSampler, TrainingLoss, fit
    from armature.components.vlm.sft.preferences import PreferenceLoss, dpo_trainer, samples_of_pairs

    outputs = read_rollouts(played.path)
    adapter = get_adapter(
        weights, load_processor(weights, model), ImageStore(context.images).open, plan.max_sequence_tokens
    )
    (samples, drops), (heldout, heldout_drops) = (
        adapter.samples(part) if dpo is None else samples_of_pairs(part, adapter)
        for part in (_split(outputs, split) for split in ("train", "heldout"))
    )
    drops.update(heldout_drops)
    drops.update(outputs.drops)
    if not samples:
        raise DataError(
            f"none of the {played.kind} can be trained on; dropped: {dict(drops)}",
            code="no_sample_usable",
            where=str(played.path),
            remedy="read the detail of the first failure in failures.parquet in this folder, or raise "
            "max_sequence_tokens",
        )
    steps = EpochSampler(samples, plan.epochs, plan.samples_per_step, plan.seed, 1 if dpo is None else 2)
    trained = plan.trainer(steps.steps)
    policy = TrainerPolicySettings(
        model_path=weights,
        model=model,
        trainer=trained if dpo is None else dpo_trainer(trained, dpo.beta),
        temperature=1.0,
        sampled=False,
        images=context.images,
    )
    history = History(context.workspace / "history.jsonl")
    with TrainerClient(policy, context.machine, context.workspace / "trainer", context.saved) as trainer:
        loss: TrainingLoss = AnswerLoss(trainer, heldout)
        if dpo is not None:
            workspace, at_once = context.workspace, plan.samples_per_step
            loss = PreferenceLoss(trainer, workspace, samples, heldout, dpo.beta, at_once)
        fit(trainer, loss, steps, plan.save_every, history, context.events, out / CHECKPOINT)
    rows = history.read()
    write_json(out / "history.json", rows)
    write_json(out / "lineage.json", [{"step": 0, played.kind: played.digest}])
    write_json(out / "metrics.json", summary(rows))
    write_pages(out, settings, model, played.kind, outputs, rows, context.images)
    counts = {played.kind: len(outputs.trajectories), "samples": len(samples), "steps": steps.steps}
    return StageReport(rows=counts, drops=dict(drops))


def summary(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return figures from the history: means of the loss and others at the end of the training, and held-out figures.

    The means are over the last tenth of the steps, as far as a step has the metric. Held-out figures are from before
    and after the training.
    """
    trained = history[1:]
    numbers = last_tenth(trained, ("loss", "probability", "reward_margin", "pair_accuracy"))
    for name in HELDOUT:
        if measured := [row[f"heldout/{name}"] for row in history if f"heldout/{name}" in row]:
            numbers |= {f"heldout_{name}_before": measured[0], f"heldout_{name}": measured[-1]}
    return numbers


def write_pages(
    folder: Path,
    settings: Settings,
    model: ModelSettings,
    kind: str,
    outputs: GenerateOutputs,
    history: list[dict[str, float]],
    images: Path,
) -> None:
    """Write the page `report.html` to `folder`."""
    from armature.components.artifacts.images import ImageStore
    from armature.components.models.source import CHECKPOINT
    from armature.components.pages.records import token_decoder
    from armature.components.pages.report import Rollouts
    from armature.components.pages.training import write_training_report

    numbers = summary(history)
    figures = {kind: f"{len(outputs.trajectories):,}"}
    for name in HELDOUT:
        if (key := f"heldout_{name}") in numbers:
            figures[f"held-out {name.replace('_', ' ')}"] = (
                f"{numbers[f'{key}_before']:.4g} before, {numbers[key]:.4g} after"
            )
    dropped = Counter(failure.reason for failure in outputs.failures)
    figures |= {f"left out: {reason}": f"{count:,}" for reason, count in sorted(dropped.items())}
    write_training_report(
        folder,
        title=f"Supervised training of {model.source} on {kind} of {outputs.trajectories[0].environment}",
        history=history,
        configuration=settings.model_dump(mode="json"),
        figures=figures,
        rollouts=Rollouts(
            outputs.trajectories, outputs.failures, ImageStore(images), token_decoder(folder / CHECKPOINT)
        ),
    )


def _split(outputs: GenerateOutputs, split: str) -> GenerateOutputs:
    return GenerateOutputs([trajectory for trajectory in outputs.trajectories if trajectory.split == split])


def sft(
    settings: SupervisedStageSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Run the stage: train on the conversations of the input artifact; see `train_on`."""
    from armature.components.models.source import locate

    weights = locate(inputs["model"].path, settings.model.revision)
    conversations, model, trainer = inputs["conversations"], settings.model, settings.trainer
    return train_on(conversations, settings, model, trainer, weights, out, context, settings.dpo)


SFT_STAGE = Stage("sft", 1, SupervisedStageSettings, ("conversations", "model"), sft)
