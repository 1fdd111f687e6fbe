"""Evaluations during training: a fixed panel of held-out tasks, played by the weights after some of the steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.artifacts.images import ImageStore
from components.artifacts.manifest import write_manifest
from components.artifacts.store import ArtifactStore
from components.contracts.episodes import Environment, Task
from components.contracts.errors import DataError, ServerError
from components.contracts.numbers import write_json
from components.contracts.rollouts import GenerateOutputs
from components.contracts.stages import Artifact, StageContext
from components.evaluation.results import (
    collect_results,
    failures_said,
    refuse_unfinished,
    split_metrics,
    write_results,
)
from components.evaluation.settings import PanelSettings
from components.evaluation.wilson import Interval
from components.inference.pool import ServerPool
from components.rollouts.collect import collect
from components.rollouts.table import write_rollouts

KIND = "evaluations"
METRICS_FILE = "metrics.json"
BEST = "best"
"""Folder of the workspace with the weights of the best evaluation."""
HISTORY_KEYS = {
    "heldout/accuracy": "accuracy",
    "heldout/low": "accuracy_low",
    "heldout/high": "accuracy_high",
    "heldout/reward": "reward",
    "heldout/episodes": "episodes",
    "heldout/failed": "failed",
}
"""Names in a run's history, and in the metrics of an evaluation."""


@dataclass(frozen=True)
class HeldoutPanel:
    """What is played. `environment` is not the one that training plays, which so notices nothing of it."""

    settings: PanelSettings
    tasks: Sequence[Task]
    environment: Environment
    digests: Mapping[str, str]


class Evaluations:
    """The evaluations of a run. Each is an artifact, which is made once; all else is computed from these.

    Those that an earlier attempt has made are there from the beginning, later ones than its last checkpoint included.
    """

    def __init__(self, panel: HeldoutPanel, context: StageContext, store: ArtifactStore, last: int) -> None:
        self.panel, self._context, self._store, self._last = panel, context, store, last
        self.made: dict[int, Artifact] = {}
        self.metrics: dict[int, dict[str, Any]] = {}
        for step in filter(self.due, range(last + 1)):
            if (made := store.find(KIND, self._key(step))) is None:
                break
            self._add(step, made)

    def due(self, step: int) -> bool:
        """Whether the weights after `step` play: before step 1, after each so many, and after the last."""
        return step % self.panel.settings.every == 0 or step == self._last

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
                remedy="start the run again: it resumes from its last checkpoint",
            )
        settings = self.panel.settings
        results = collect_results(outputs, self.panel.tasks, settings.success_reward)
        metrics = split_metrics(results)
        if failures := failures_said(results):
            self._context.events.message(f"evaluation after step {step}: {failures}")

        def fill(folder: Path) -> None:
            write_rollouts(folder, outputs)
            write_results(folder, results)
            write_json(folder / METRICS_FILE, metrics)
            write_manifest(
                folder,
                kind=KIND,
                kind_version=1,
                rows={"tasks": len(self.panel.tasks), "episodes": len(results)},
                drops=outputs.drops,
                inputs=dict(self.panel.digests),
                settings={"run": self._context.fingerprint, "step": step},
            )

        artifact = self._store.write(KIND, self._key(step), fill)
        self._add(step, artifact)
        self._context.events.artifact(artifact, "output", step)

    def history(self, step: int) -> dict[str, float]:
        """The numbers of `step` for the run's history; none where it has no evaluation."""
        found = self.metrics.get(step, {})
        return {key: float(found[name]) for key, name in HISTORY_KEYS.items() if name in found}

    @property
    def best(self) -> int:
        """The step after which the weights were best."""
        return best_step({step: measure(metrics) for step, metrics in self.metrics.items()})

    @property
    def best_weights(self) -> Path:
        """The folder of these weights, in the Hugging Face layout."""
        return self._context.workspace / BEST / f"step-{self.best:06d}"

    def refuse_lost_weights(self, done: int) -> None:
        """
        Raises:
            DataError: the weights of the best evaluation are gone, and those after step `done` are others.
        """
        if self.made and self.best <= done and not self.best_weights.is_dir():
            raise DataError(
                f"the weights after step {self.best}, the best of {len(self.made)} evaluations, are gone",
                where=str(self.best_weights),
                remedy="train again from the beginning: --force train-vlm",
            )

    def keep_best(self, step: int, publish: Callable[[Path], None]) -> None:
        """Have the weights after `step` written, if they are the best, in place of those that were."""
        folder = self.best_weights
        if step != self.best or folder.exists():
            return
        publish(folder)
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)

    def summary(self) -> dict[str, float]:
        """The best evaluation in a few numbers."""
        found = self.metrics[self.best]
        names = ("accuracy", "accuracy_low", "accuracy_high", "reward", "tasks")
        numbers = {f"best/{name.removeprefix('accuracy_')}": float(found[name]) for name in names}
        return numbers | {"best/step": float(self.best), "evaluations": float(len(self.metrics))}

    def said(self, step: int) -> str:
        """The result of `step` in a line."""
        found = self.metrics[step]
        interval = Interval(found["accuracy"], found["accuracy_low"], found["accuracy_high"], found["tasks"])
        best = "the best so far" if self.best == step else f"the best is that after step {self.best}"
        return f"evaluation after step {step}: accuracy {interval} of {found['tasks']} tasks, {best}"

    def out_of_patience(self, step: int) -> bool:
        """Whether training ends after `step`."""
        until = {each: measure(metrics) for each, metrics in self.metrics.items() if each <= step}
        patience = self.panel.settings.patience
        return patience > 0 and sum(each > best_step(until) for each in until) >= patience

    def _add(self, step: int, made: Artifact) -> None:
        self.made[step] = made
        self.metrics[step] = json.loads((made.path / METRICS_FILE).read_text())

    def _key(self, step: int) -> str:
        return f"{self._context.fingerprint}-{step:05d}"


Measure = tuple[float, float]


def measure(metrics: Mapping[str, Any]) -> Measure:
    """What is compared: the accuracy, then the mean reward, which tells apart what solves equally many tasks."""
    return metrics["accuracy"], metrics["reward"]


def best_step(measures: Mapping[int, Measure]) -> int:
    """The first of those that no other surpasses."""
    return max(sorted(measures), key=lambda step: measures[step])
