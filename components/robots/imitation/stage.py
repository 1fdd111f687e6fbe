"""The stage `train-vla`: train a policy on datasets, normalized by their statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from armature.components.contracts.metrics import last_tenth, write_json
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.robots.imitation.settings import TrainVLASettings

INPUTS = ("policy", "dataset", "statistics")
History = Sequence[Mapping[str, float]]


def train_vla(
    settings: TrainVLASettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Write `checkpoint/` (self-contained, released layout), `history.json`, `metrics.json` and `report.html`.

    Raises:
        ConfigurationError, DataError: settings, datasets, statistics and policy do not fit each other.
        TrainerError: the training process keeps dying.
    """
    from armature.components.artifacts.json_lines import History as HistoryFile
    from armature.components.models.source import CHECKPOINT
    from armature.components.robots.imitation.train import PolicyTrainerClient, PolicyTraining, train

    artifacts = {name: inputs[name].path.resolve() for name in INPUTS}
    training = PolicyTraining(settings=settings, **artifacts, fingerprint=context.fingerprint)
    context.workspace.mkdir(parents=True, exist_ok=True)
    file = HistoryFile(context.workspace / "history.jsonl")
    with PolicyTrainerClient(training, context.machine, context.workspace / "trainer", context.saved) as trainer:
        train(trainer, settings.training, file, context.events, out / CHECKPOINT)
    history = file.read()
    numbers = summary(history)
    write_json(out / "history.json", history)
    write_json(out / "metrics.json", numbers)
    write_pages(out, settings, history, numbers)
    return StageReport(rows={"steps": settings.training.max_steps})


def summary(history: History) -> dict[str, float]:
    """Return means over the last tenth of the updates, and the first and last measurements on held-out frames.

    `action_error_ratio` is the error of always predicting the mean action, divided by the policy's error.
    """
    trained = history[1:] if history[0]["step"] == 0 else history
    averaged = ("loss", "loss/flow", "loss/cross_entropy", "samples_per_second", "padding_fraction")
    numbers = last_tenth(trained, averaged)
    numbers["updates_skipped"] = trained[-1]["updates_skipped"]
    numbers["memory_peak_gib"] = max(row["memory/peak_gib"] for row in trained)
    measured = [row for row in history if "heldout/loss" in row]
    if measured:
        first, last = measured[0], measured[-1]
        error, constant = last["heldout/action_error"], last["heldout/mean_action_error"]
        numbers |= {
            "heldout_loss_before": first["heldout/loss"],
            "heldout_loss": last["heldout/loss"],
            "action_error_before": first["heldout/action_error"],
            "action_error": error,
            "mean_action_error": constant,
            "action_error_ratio": constant / error,
        }
    return numbers


def write_pages(folder: Path, settings: TrainVLASettings, history: History, numbers: Mapping[str, float]) -> None:
    """Write `report.html`."""
    from armature.components.pages.training import write_training_report

    figures = {
        "samples per second": f"{numbers['samples_per_second']:.4g}",
        "peak memory": f"{numbers['memory_peak_gib']:.3g} GiB",
        "padding": f"{numbers['padding_fraction']:.1%} of the tokens",
    }
    if "heldout_loss" in numbers:
        figures |= {
            "held-out loss": f"{numbers['heldout_loss_before']:.4g} before, {numbers['heldout_loss']:.4g} after",
            "held-out action error, standard deviations": compared_errors(
                numbers["action_error"], numbers["mean_action_error"]
            ),
        }
    if numbers["updates_skipped"]:
        figures["optimizer steps skipped, gradient not finite"] = f"{numbers['updates_skipped']:.0f}"
    policy = settings.policy
    source = policy.path or policy.checkpoint_path or "a tiny policy"
    write_training_report(
        folder,
        title=f"Training of {source} ({settings.training.mode}, {policy.action_mode})",
        history=history,
        configuration=settings.model_dump(mode="json"),
        figures=figures,
    )


def compared_errors(error: float, constant: float) -> str:
    """Describe in words how `error` compares with `constant`, the error of always predicting the mean action."""
    if error <= constant:
        relation = f"{constant / error:.3g} times smaller than" if error else "against"
    else:
        relation = f"{error / constant:.3g} times larger than" if constant else "against"
    return f"{error:.3g}, {relation} the error of the mean action ({constant:.3g})"


TRAIN_VLA_STAGE = Stage("train-vla", 4, TrainVLASettings, INPUTS, train_vla)
