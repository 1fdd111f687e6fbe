"""Evaluations between training steps: when they are due, which weights are the best, and when the training ends."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from anyio.from_thread import BlockingPortal

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.json_lines import History
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.errors import DataError, ServerError
from armature.components.contracts.metrics import merged, metrics_below, write_json
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.environments.mixture import EnvironmentMixture
from armature.components.evaluation.results import (
    collect_results,
    describe_failures,
    refuse_unfinished,
    split_metrics,
    write_results,
)
from armature.components.evaluation.settings import EvaluationSchedule, HeldoutSetSettings
from armature.components.evaluation.wilson import Interval
from armature.components.inference.pool import ServerPool
from armature.components.rollouts.collect import collect
from armature.components.rollouts.table import write_rollouts

METRICS_FILE = "metrics.json"
BEST = "best"
"""Name of the workspace's folder with the weights of the best evaluation."""
Measure = tuple[float, ...]


def due(plan: EvaluationSchedule, step: int, last: int) -> bool:
    """Tell if the weights after `step` are evaluated: before step 1, every `plan.every` steps, and after the last."""
    return step % plan.every == 0 or step == last


class Evaluations(ABC):
    """The evaluations of a run. Each one is an artifact that is made once; everything else is computed from them.

    Evaluations that an earlier attempt of the run made are loaded at the beginning, including those after its last
    checkpoint.
    """

    KIND: ClassVar[str]
    """Kind of the artifacts that the evaluations write."""
    STAGE: ClassVar[str]
    HISTORY_KEYS: ClassVar[Mapping[str, str]]
    """Names of metrics in a run's history, mapped to the names of these metrics in an evaluation."""
    RATE: ClassVar[str]
    """Name of the metric with the share of successes. RATE_low and RATE_high bound its confidence interval."""
    SUMMARY: ClassVar[tuple[str, ...]]
    """Names of further metrics of the best evaluation that a run's summary contains.

    The last one is the number of trials from which RATE was computed.
    """

    def __init__(self, plan: EvaluationSchedule, context: StageContext, store: ArtifactStore, last: int) -> None:
        self._plan, self._context, self._store, self._last = plan, context, store, last
        self.made: dict[int, Artifact] = {}
        self.metrics: dict[int, dict[str, Any]] = {}
        for step in filter(self.due, range(last + 1)):
            if (made := store.find(self.KIND, self._key(step))) is None:
                break
            self._add(step, made)
        if not self.made:  # then these are the best weights of a training with other settings in the same folder
            shutil.rmtree(context.workspace / BEST, ignore_errors=True)

    @abstractmethod
    def measure(self, metrics: Mapping[str, Any]) -> Measure:
        """Return the numbers by which evaluations are compared, most important first; larger is better."""

    @abstractmethod
    def play(self, step: int) -> None:
        """Play with the weights after `step` and write the results."""

    def report_line(self, step: int) -> str:
        """Return one line about the evaluation after `step`."""
        metrics, best, counted = self.metrics[step], self.best, self.SUMMARY[-1]
        rate = f"{self.RATE} {Interval(*(metrics[name] for name in self._measured()))} of {metrics[counted]} {counted}"
        place = "the best so far" if best == step else f"the best is that after step {best}"
        return f"evaluation after step {step}: {rate}, {place}"

    def summary(self) -> dict[str, float]:
        """Return metrics of the best evaluation, its step, and the number of evaluations."""
        metrics = self.metrics[self.best]
        names = (*self._measured()[:3], *self.SUMMARY)
        numbers = {f"best/{name.removeprefix(f'{self.RATE}_')}": float(metrics[name]) for name in names}
        return numbers | {"best/step": float(self.best), "evaluations": float(len(self.metrics))}

    @classmethod
    def figures(cls, summary: Mapping[str, float]) -> dict[str, str]:
        """Return figures for a report of `summary`, as captions mapped to values; empty if `summary` is empty."""
        if not summary:
            return {}
        interval = Interval(*(summary[f"best/{name}"] for name in (cls.RATE, "low", "high", cls.SUMMARY[-1])))
        return {
            f"best held-out {cls.RATE}, 95 % interval": str(interval),
            "checkpoint": f"of step {summary['best/step']:.0f}, the best of {summary['evaluations']:.0f} evaluations",
        }

    def due(self, step: int) -> bool:
        """Tell if the weights after `step` are evaluated; see the function `due`."""
        return due(self._plan, step, self._last)

    def history(self, step: int) -> dict[str, float]:
        """Return the metrics of the evaluation after `step` for the run's history; empty without an evaluation."""
        metrics = self.metrics.get(step, {})
        return {key: float(metrics[name]) for key, name in self.HISTORY_KEYS.items() if name in metrics}

    def complete(self, history: History, step: int) -> dict[str, float]:
        """Add the metrics of the evaluation after `step` to its row of a run's history, and return the row."""
        row = next((row for row in history.read() if row["step"] == step), {})
        evaluation = self.history(step)
        others = {"step", *self.HISTORY_KEYS, *evaluation}
        whole = merged(run={key: row[key] for key in row if key not in others}, evaluation=evaluation)
        history.append(step, whole)
        return whole

    @property
    def best(self) -> int:
        """The step after which the weights were the best."""
        return best_step({step: self.measure(metrics) for step, metrics in self.metrics.items()})

    @property
    def best_weights(self) -> Path:
        """The folder with the published weights of the best evaluation."""
        return self._context.workspace / BEST / f"step-{self.best:06d}"

    def refuse_lost_weights(self, done: int) -> None:
        """Check that the weights of the best evaluation are still on the disk.

        Args:
            done: the last step that the trainer has completed. Evaluations of later steps are not checked, because the
                training repeats these steps and writes their weights again.

        Raises:
            DataError: the weights are missing, and the trainer is past the step that made them.
        """
        if self.made and self.best <= done and not self.best_weights.is_dir():
            raise DataError(
                f"the weights after step {self.best}, the best of {len(self.made)} evaluations, are missing",
                code="best_weights_missing",
                where=str(self.best_weights),
                remedy=f"run the training again from its beginning: --force {self.STAGE}",
            )

    def keep_best(self, step: int, publish: Callable[[Path], None]) -> None:
        """If the weights after `step` are the best, let `publish` write them and delete the previously best ones."""
        folder = self.best_weights
        if step != self.best or folder.exists():
            return
        publish(folder)
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)

    def out_of_patience(self, step: int) -> bool:
        """Tell if the training ends after `step`, because `patience` evaluations did not improve on the best one."""
        until = {each: self.measure(metrics) for each, metrics in self.metrics.items() if each <= step}
        patience = self._plan.patience
        return patience > 0 and sum(each > best_step(until) for each in until) >= patience

    def _measured(self) -> tuple[str, ...]:
        return self.RATE, f"{self.RATE}_low", f"{self.RATE}_high", self.SUMMARY[-1]

    def _write(self, step: int, metrics: Mapping[str, Any], fill: Callable[[Path], None], **facts: Any) -> None:
        """Write the artifact of the evaluation after `step`: the files that `fill` writes, and `metrics`.

        Args:
            facts: see `write_step`.
        """

        def write(folder: Path) -> None:
            fill(folder)
            write_json(folder / METRICS_FILE, metrics)

        self._add(step, write_step(self._context, self._store, self.KIND, self._key(step), step, write, **facts))

    def _add(self, step: int, made: Artifact) -> None:
        self.made[step] = made
        self.metrics[step] = json.loads((made.path / METRICS_FILE).read_text())

    def _key(self, step: int) -> str:
        return f"{self._context.fingerprint}-{step:05d}"


def best_step(measures: Mapping[int, Measure]) -> int:
    """Return the step with the best measure. If several measures are equal, return the first of their steps.

    Example:
        >>> best_step({0: (0.5,), 10: (0.75,), 20: (0.75,)})
        10
    """
    return max(sorted(measures), key=lambda step: measures[step])


def write_step(
    context: StageContext,
    store: ArtifactStore,
    kind: str,
    key: str,
    step: int,
    fill: Callable[[Path], None],
    **facts: Any,
) -> Artifact:
    """Write an artifact of step `step` of a run, and report it to the run's events.

    Args:
        fill: writes the artifact's files to a folder.
        facts: the manifest's `rows`, `drops` and `inputs`.
    """

    def write(folder: Path) -> None:
        fill(folder)
        settings = {"run": context.fingerprint, "step": step}
        write_manifest(folder, kind=kind, kind_version=1, settings=settings, **facts)

    artifact = store.write(kind, key, write)
    context.events.artifact(artifact, "output", step)
    return artifact


# --- Evaluations on model servers ---


@dataclass(frozen=True)
class HeldoutSet:
    """The tasks that every evaluation during training plays, and the environment that plays them."""

    settings: HeldoutSetSettings
    tasks: Sequence[Task]
    environment: Environment
    """An instance that only evaluations use, so they cannot disturb training."""
    digests: Mapping[str, str]
    """Digests, by name, of the artifacts from which the tasks come. Manifests of evaluations list them."""


class HeldoutEvaluations(Evaluations):
    """Evaluations during training that play a held-out set on model servers."""

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
        heldout: HeldoutSet,
        pool: ServerPool,
        portal: BlockingPortal,
        context: StageContext,
        store: ArtifactStore,
        last: int,
    ) -> None:
        self.heldout, self._pool, self._portal = heldout, pool, portal
        super().__init__(heldout.settings, context, store, last)

    def play(self, step: int) -> None:
        """Play every held-out task with the weights after `step`, which the servers hold, and write the results.

        Raises:
            ServerError: no episode could be finished, or others than these weights played.
        """
        self._keep(step, self._portal.call(self._collect))

    async def _collect(self) -> GenerateOutputs:
        """Play the held-out tasks once, with the seeds of the evaluation stage, the same after every step.

        Afterwards reset the servers' caches of prompts and images, so that rollouts find them in the same state as
        without an evaluation.
        """
        settings, context = self.heldout.settings, self._context
        outputs = await collect(
            self.heldout.environment,
            self.heldout.tasks,
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
        settings = self.heldout.settings
        field = "environment" if isinstance(self.heldout.environment, EnvironmentMixture) else ""
        results = collect_results(outputs, self.heldout.tasks, settings.success_reward, field)
        if failures := describe_failures(results):
            self._context.events.message(f"evaluation after step {step}: {failures}")

        def fill(folder: Path) -> None:
            write_rollouts(folder, outputs)
            write_results(folder, results)

        rows = {"tasks": len(self.heldout.tasks), "episodes": len(results)}
        self._write(step, split_metrics(results), fill, rows=rows, drops=outputs.drops, inputs=self.heldout.digests)

    def history(self, step: int) -> dict[str, float]:
        """Return the metrics for the run's history; with the accuracy in each environment of a mixture."""
        kinds: Mapping[str, Any] = self.metrics.get(step, {}).get("kinds", {})
        parts = {name: kind["accuracy"] for name, kind in kinds.items() if set(kinds) != {"all"}}
        return super().history(step) | metrics_below("heldout_accuracy_of", parts)

    def measure(self, metrics: Mapping[str, Any]) -> Measure:
        """Return the accuracy and the mean reward. The reward decides between weights that solve equally many tasks."""
        return metrics["accuracy"], metrics["reward"]
