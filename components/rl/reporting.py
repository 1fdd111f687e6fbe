"""The report page of a run: learning curves, and the rollouts of the first and last step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.rollouts import Failure, Trajectory
from armature.components.contracts.stages import StageContext
from armature.components.pages.records import TurnScores, token_decoder
from armature.components.pages.report import Rollouts, Table
from armature.components.pages.training import write_training_report
from armature.components.rl.evaluations import HeldoutEvaluations
from armature.components.rl.settings import TrainVLMSettings
from armature.components.rollouts.batches.ratios import read_scores
from armature.components.rollouts.table import read_rollouts

TASKS = {
    "tasks/played": "played",
    "tasks/with_signal": "gave different rewards within a group, at least once",
    "tasks/always_right": "never did: every rollout earned the largest reward",
    "tasks/always_wrong": "never did: the rollouts of a group earned the same, less than the largest reward",
    "tasks/right_or_wrong": "never did: in some groups all earned the largest reward, in others all earned less",
}
"""Names of the counts of tasks that `difficulty_counts` makes, mapped to their captions on the report page."""


HELDOUT = "held-out accuracy, before and after"
"""Caption of the figure with both accuracies."""


@dataclass(frozen=True)
class ShownStep:
    """A step that the report page shows.

    It has the folders of the step's rollouts and of its batch, and the file with its log-ratios.
    """

    step: int
    rollouts: Path
    batch: Path
    log_ratios: Path


def write_pages(
    folder: Path,
    settings: TrainVLMSettings,
    history: list[dict[str, float]],
    shown: Sequence[ShownStep],
    context: StageContext,
    best: Mapping[str, float],
    tasks: Mapping[str, int],
) -> None:
    """Write the page `report.html` to `folder`.

    Args:
        best: the summary of the best evaluation; see `Evaluations.summary`.
        tasks: counts of tasks; see `difficulty_counts`.
    """
    trajectories: list[Trajectory] = []
    failures: list[Failure] = []
    steps: dict[str, int] = {}
    scores: dict[str, list[TurnScores]] = {}
    for one in shown:
        outputs = read_rollouts(one.rollouts)
        trajectories += outputs.trajectories
        failures += outputs.failures
        steps |= {trajectory.trajectory_id: one.step for trajectory in outputs.trajectories}
        scores |= read_scores(outputs.trajectories, one.batch, one.log_ratios)
    decode = token_decoder(folder / "checkpoint")
    write_training_report(
        folder,
        title=f"{context.recipe or 'Training'}: {settings.model.source} on {settings.environment.name}",
        history=history,
        configuration=settings.model_dump(mode="json"),
        figures={**_before_and_after(history, best), **HeldoutEvaluations.figures(best)},
        tables=[Table("Tasks", ["groups", "tasks"], [[text, f"{tasks[name]:,}"] for name, text in TASKS.items()])],
        rollouts=Rollouts(trajectories, failures, ImageStore(context.images), decode, steps, scores),
    )


def _before_and_after(history: Sequence[Mapping[str, float]], best: Mapping[str, float]) -> dict[str, str]:
    """Return the held-out accuracy before the first step and of the checkpoint; empty without evaluations."""
    rows = {row["step"]: row["heldout/accuracy"] for row in history if "heldout/accuracy" in row}
    if 0 not in rows or best.get("best/step") not in rows:
        return {}
    return {HELDOUT: f"{rows[0]:.3f} → {rows[best['best/step']]:.3f}"}
