"""Evaluations during training: a fixed panel of held-out tasks, played by the weights after some of the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal

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

    KIND, STAGE, RATE, SUMMARY = "evaluations", "train-vlm", "accuracy", ("reward", "tasks")
    HISTORY_KEYS = {  # noqa: RUF012
        "heldout/accuracy": "accuracy",
        "heldout/low": "accuracy_low",
        "heldout/high": "accuracy_high",
        "heldout/reward": "reward",
        "heldout/episodes": "episodes",
        "heldout/failed": "failed",
    }

    def __init__(
        self,
        panel: HeldoutPanel,
        pool: ServerPool,
        portal: BlockingPortal,
        context: StageContext,
        store: ArtifactStore,
        last: int,
    ) -> None:
        self.panel, self._pool, self._portal = panel, pool, portal
        super().__init__(panel.settings, context, store, last)

    def play(self, step: int) -> None:
        """Play every task of the panel with the weights after `step`, which the servers hold, and write the results.

        Raises:
            ServerError: no episode could be finished, or others than these weights played.
        """
        self._keep(step, self._portal.call(self._collect))

    async def _collect(self) -> GenerateOutputs:
        """Seeds are those of the evaluation stage, the same at every step. Afterwards the servers have forgotten the
        prompts and images: rollouts find them as they would without an evaluation.
        """
        settings, context = self.panel.settings, self._context
        outputs = await collect(
            self.panel.environment,
            self.panel.tasks,
            settings.samples_per_task,
            self._pool,
            ImageStore(context.images),
            settings.sampling,
            step=0,
            seed=settings.seed,
            machine=context.machine,
            events=context.events,
            name="evaluation",
        )
        await self._pool.reset_caches()
        return outputs

    def _keep(self, step: int, outputs: GenerateOutputs) -> None:
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
        self._write(step, split_metrics(results), fill, rows=rows, drops=outputs.drops, inputs=self.panel.digests)

    def measure(self, metrics: Mapping[str, Any]) -> Measure:
        """The accuracy, then the mean reward, which tells apart what solves equally many tasks."""
        return metrics["accuracy"], metrics["reward"]
