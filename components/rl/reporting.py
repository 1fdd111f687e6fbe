"""The pages of a run: its report with learning curves, and a viewer of its first and last rollouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from components.artifacts.images import ImageStore
from components.batches.table import read_batch
from components.contracts.batches import Sample
from components.contracts.rollouts import Failure, LogProbs, Trajectory
from components.contracts.stages import Artifact
from components.reports.tokens import token_decoder
from components.reports.training import write_training_report
from components.reports.viewer import Rollouts, TurnScores, write_viewer
from components.rl.settings import TrainVLMSettings
from components.rollouts.table import read_rollouts

VIEWER_FILE = "rollouts.html"


@dataclass
class ViewerSteps:
    """Steps that were picked to look at, with what the trainer computed of their tokens."""

    steps: dict[str, tuple[Artifact, Artifact, Sequence[LogProbs]]] = field(default_factory=dict)

    def add(self, rollouts: Artifact, batch: Artifact, scores: Sequence[LogProbs]) -> None:
        """Keep a step; one that is applied again after a crash replaces itself."""
        self.steps[rollouts.digest] = (rollouts, batch, scores)


def write_pages(
    folder: Path, settings: TrainVLMSettings, history: list[dict[str, float]], gallery: ViewerSteps, images: Path
) -> None:
    """Writes `report.html`, `curves.png` and `rollouts.html`."""
    title = f"Training {settings.model.source} on {settings.environment.name}"
    write_training_report(
        folder,
        title=title,
        history=history,
        configuration=settings.model_dump(mode="json"),
        links={"Rollouts": VIEWER_FILE},
    )
    trajectories: list[Trajectory] = []
    failures: list[Failure] = []
    steps: dict[str, int] = {}
    scores: dict[str, list[TurnScores]] = {}
    for rollouts, batch, logprobs in gallery.steps.values():
        outputs = read_rollouts(rollouts.path)
        step = int(outputs.trajectories[0].trajectory_id.partition("-")[0]) if outputs.trajectories else 0
        trajectories += outputs.trajectories
        failures += outputs.failures
        steps |= {trajectory.trajectory_id: step for trajectory in outputs.trajectories}
        scores |= turn_scores(outputs.trajectories, read_batch(batch.path), logprobs)
    write_viewer(
        folder / VIEWER_FILE,
        Rollouts(trajectories, failures, steps, scores),
        images=ImageStore(images),
        decode=token_decoder(folder / "checkpoint"),
        title=title,
    )


def turn_scores(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], logprobs: Sequence[LogProbs]
) -> dict[str, list[TurnScores]]:
    """Log-probs and advantages of the sampled tokens, turn by turn; nothing for turns that were not trained on."""
    values: dict[str, list[tuple[LogProbs, LogProbs]]] = defaultdict(list)
    for sample, scored in zip(samples, logprobs, strict=True):
        values[sample.trajectory_id].append((scored[sample.loss_mask], sample.advantages[sample.loss_mask]))
    found: dict[str, list[TurnScores]] = {}
    for trajectory in trajectories:
        if trajectory.trajectory_id not in values:
            continue
        scored, advantages = (np.concatenate(part) for part in zip(*values[trajectory.trajectory_id], strict=True))
        ends = np.cumsum([len(turn.completion_token_ids) for turn in trajectory.turns])
        if ends[-1] != len(scored):  # some of its turns were dropped, so tokens and turns do not line up
            continue
        pieces = zip(np.split(scored, ends[:-1]), np.split(advantages, ends[:-1]), strict=True)
        found[trajectory.trajectory_id] = [TurnScores(logprobs, advantage) for logprobs, advantage in pieces]
    return found
