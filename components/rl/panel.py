"""Evaluations during training: a fixed panel of held-out tasks, played by the weights after some of the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.errors import ServerError
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import StageContext
from armature.components.evaluation.results import (
    collect_results,
    failures_said,
    refuse_unfinished,
    split_metrics,
    write_results,
)
from armature.components.evaluation.settings import PanelSettings
from armature.components.evaluation.wilson import Interval
from armature.components.inference.pool import ServerPool
from armature.components.rl.evaluations import Evaluations, Measure
from armature.components.rollouts.collect import collect
from armature.components.rollouts.table import write_rollouts


@dataclass(frozen=True)
class HeldoutPanel:
    """What is played. `environment` is not the one that training plays, which so notices nothing of it."""

    settings: PanelSettings
    tasks: Sequence[Task]
    environment: Environment
    digests: Mapping[str, str]


class PanelEvaluations(Evaluations):
    """Those of a panel that is played on servers."""

    KIND, STAGE = "evaluations", "train-vlm"
    HISTORY_KEYS = {  # noqa: RUF012
        "heldout/accuracy": "accuracy",
        "heldout/low": "accuracy_low",
        "heldout/high": "accuracy_high",
        "heldout/reward": "reward",
        "heldout/episodes": "episodes",
        "heldout/failed": "failed",
    }

    def __init__(self, panel: HeldoutPanel, context: StageContext, store: ArtifactStore, last: int) -> None:
        self.panel = panel
        super().__init__(panel.settings, context, store, last)

    async def play(self, pool: ServerPool) -> GenerateOutputs:
        """Every task of the panel, by the weights that the servers hold.

        Seeds are those of the evaluation stage, the same at every step. Afterwards the servers have forgotten the
        prompts and images: rollouts find them as they would without an evaluation.
        """
        settings, context = self.panel.settings, self._context
        outputs = await collect(
            self.panel.environment,
            self.panel.tasks,
            settings.samples_per_task,
            pool,
            ImageStore(context.images),
            settings.sampling,
            step=0,
            seed=settings.seed,
            machine=context.machine,
            events=context.events,
            name="evaluation",
        )
        await pool.reset_caches()
        return outputs

    def keep(self, step: int, outputs: GenerateOutputs) -> None:
        """Write what the weights after `step` played, and what it says.

        Raises:
            ServerError: no episode could be finished, or others than these weights played.
        """
        refuse_unfinished(outputs)
        versions = {turn.policy_version for each in outputs.trajectories for turn in each.turns}
        if versions != {step}:
            raise ServerError(
                f"the evaluation after step {step} was played by versions {sorted(versions)} of the weights",
                code="other_weights_played",
                remedy="start the run again: it resumes from its last checkpoint",
            )
        settings = self.panel.settings
        results = collect_results(outputs, self.panel.tasks, settings.success_reward)
        if failures := failures_said(results):
            self._context.events.message(f"evaluation after step {step}: {failures}")

        def fill(folder: Path) -> None:
            write_rollouts(folder, outputs)
            write_results(folder, results)

        rows = {"tasks": len(self.panel.tasks), "episodes": len(results)}
        self._write(step, split_metrics(results), fill, rows, outputs.drops, dict(self.panel.digests))

    def measure(self, metrics: Mapping[str, Any]) -> Measure:
        """The accuracy, then the mean reward, which tells apart what solves equally many tasks."""
        return metrics["accuracy"], metrics["reward"]

    def summary(self) -> dict[str, float]:
        found = self.metrics[self.best]
        names = ("accuracy", "accuracy_low", "accuracy_high", "reward", "tasks")
        numbers = {f"best/{name.removeprefix('accuracy_')}": float(found[name]) for name in names}
        return numbers | {"best/step": float(self.best), "evaluations": float(len(self.metrics))}

    def said(self, step: int) -> str:
        found = self.metrics[step]
        interval = Interval(found["accuracy"], found["accuracy_low"], found["accuracy_high"], found["tasks"])
        return f"evaluation after step {step}: accuracy {interval} of {found['tasks']} tasks, {self._best_said(step)}"
