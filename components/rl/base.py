"""Base class of RL runs, for language models and robot policies: a step's units as artifacts, each applied once."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from armature.components.artifacts.disk import link_folder
from armature.components.artifacts.json_lines import History
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import TrainerError
from armature.components.contracts.metrics import merged, metrics_below, write_json
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.models.source import CHECKPOINT
from armature.components.rl.evaluations import Evaluations, write_step
from armature.components.rl.loop import LoopPlan, run_loop
from armature.components.rl.metrics import CpuTimes
from armature.components.rollouts.batches.table import BuiltBatch
from armature.components.training.client import ServiceClient, with_restarts

BATCH_METRICS = "metrics.json"
EVALUATION = "evaluation"
T = TypeVar("T")


class TrainingRun(ABC):
    """The units of work of `run_loop`, each of which can be repeated after a crash.

    Rollouts and batches are stored as artifacts, and a step is applied only once.

    The batches are a write-ahead log. A trainer that restarts from its last checkpoint applies the batches since then,
    and a run that is started again finds its rollouts and batches in the store.

    Args:
        trainer: the service that applies the steps.
        evaluations: the evaluations between steps; None if there are none.
    """

    ROLLOUTS: ClassVar[str]
    BATCHES: ClassVar[str]
    STAGE: ClassVar[str]
    skipped: frozenset[int] = frozenset()
    """Steps whose batches are replaced by empty ones, as `machine.skip_batches` asks."""
    stopped: Callable[[], bool] = staticmethod(lambda: False)
    """A function that is called after each step; True ends the training."""

    def __init__(
        self,
        plan: LoopPlan,
        context: StageContext,
        store: ArtifactStore,
        trainer: ServiceClient,
        evaluations: Evaluations | None,
    ) -> None:
        self.plan, self.context, self.store = plan, context, store
        self.trainer, self.evaluations = trainer, evaluations
        self.history, self.weights = History(context.workspace / "history.jsonl"), context.workspace / "weights"
        self._batch_metrics: dict[int, dict[str, float]] = {}
        self._cpu = CpuTimes()

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights that play now, which is the number of the step after which they were made."""

    @abstractmethod
    def _play(self, step: int) -> Artifact:
        """Play the rollouts of `step` and write them as an artifact."""

    @abstractmethod
    def _build(self, step: int, rollouts: Artifact) -> tuple[BuiltBatch[Any], dict[str, str]]:
        """Build the batch of `step` from its rollouts. Also return the digests of its further inputs, by name."""

    @abstractmethod
    def _write_samples(self, folder: Path, samples: Sequence[Any]) -> None:
        """Write the samples of a batch to `folder`."""

    @abstractmethod
    def _apply(self, step: int, batch: Artifact) -> dict[str, float]:
        """Let the trainer apply `step`, and return its metrics."""

    @abstractmethod
    def _give(self, version: int) -> None:
        """Give the weights after step `version` to the model servers, or to the policy that plays."""

    @abstractmethod
    def _refuse_disagreement(self) -> None:
        """Compare the trainer's log-probs with the sampler's before step 1.

        Raises:
            MismatchError: they differ.
        """

    @abstractmethod
    def _numbers(self, step: int) -> dict[str, float]:
        """Return metrics of the machine and of the rollouts of `step`, for the step's row in the history."""

    def resume(self, done: int) -> None:
        """Continue after step `done`, the last one in the trainer's newest checkpoint; 0 for a new run."""
        if done:
            self.context.events.message(f"resuming after step {done}")
            self.complete_history(done)
            self.sync(done)

    def train_into(self, out: Path, done: int) -> tuple[int, list[dict[str, float]], dict[str, float]]:
        """Make the steps after `done`, and write the checkpoint, `history.json` and `lineage.json` to `out`.

        Returns:
            The last step, the history, and the summary of the best evaluation (empty without evaluations).
        """
        last = self.train_from(done)
        self.finish(out / CHECKPOINT, last)
        history = self.history.read()
        write_json(out / "history.json", history)
        write_json(out / "lineage.json", self.lineage(last))
        return last, history, self.evaluations.summary() if self.evaluations is not None else {}

    def train_from(self, done: int) -> int:
        """Make all steps after `done`. Before step 1, check that trainer and sampler agree on log-probs.

        Returns:
            The last step, which is earlier than planned if an evaluation ended the training.

        Raises:
            DataError: the weights of the best evaluation are missing.
            MismatchError: trainer and sampler do not agree.
        """
        units, events, evaluations = self.context.units, self.context.events, self.evaluations
        if evaluations is not None:
            # Evaluate before the pre-flight, so that rollouts find the sampler in the same state with and without
            # evaluations.
            if evaluations.due(done):
                ends = units.submit(f"evaluation-{done:05d}", self.evaluate, done).result()
                events.metrics(evaluations.complete(self.history, done), done)
                if ends:
                    return done
            evaluations.refuse_lost_weights(done)
        if done == 0:
            self._refuse_disagreement()
        return run_loop(self, done + 1, self.plan, units, events)

    def rollouts(self, step: int) -> Artifact:
        """Return the rollouts of `step` from the store, or play them if the store has none."""
        return self.store.find(self.ROLLOUTS, self._key(step)) or self._play(step)

    @abstractmethod
    def wait_for_rollouts(self, step: int) -> None:
        """Prepare for the loop to block on the rollouts of `step`; see `StepUnits.wait_for_rollouts`."""

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        """Return the batch of `step`, training samples with advantages, from the store, or build it."""
        if (made := self.store.find(self.BATCHES, self._key_of(self.BATCHES, step))) is None:
            built, inputs = self._build(step, rollouts)
            metrics = merged(batch=built.metrics, drops=metrics_below("drops", built.drops))

            def fill(folder: Path) -> None:
                self._write_samples(folder, built.samples)
                (folder / BATCH_METRICS).write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")

            rows, inputs = {"samples": len(built.samples)}, {"rollouts": rollouts.digest, **inputs}
            made = self._write(self.BATCHES, step, fill, rows=rows, drops=built.drops, inputs=inputs)
        self._batch_metrics[step] = json.loads((made.path / BATCH_METRICS).read_text())
        return made

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        """Apply `step` to the weights, restarting the trainer if it dies, and return the trainer's metrics."""
        return self._of_trainer(step - 1, lambda: self._apply(step, batch))

    def save(self, step: int) -> None:
        """Start writing a checkpoint if one is due after `step`.

        The last step has no checkpoint, because its weights are published. A run that is killed before they are, or
        that is prolonged, applies the batches since the last checkpoint again.
        """
        if step % self.plan.save_every == 0 and step < self.plan.last:
            self._of_trainer(step, self.trainer.save)

    def sync(self, version: int) -> None:
        """Give the weights after step `version` to the sampler, unless all rollouts that need them exist already."""
        count = (self.plan.sync_every or self.plan.last) + self.plan.max_staleness
        if not all(self.store.find(self.ROLLOUTS, self._key(version + 1 + number)) for number in range(count)):
            self._give(version)

    def evaluates(self, step: int) -> bool:
        """Tell whether the weights after `step` are evaluated."""
        return self.evaluations is not None and self.evaluations.due(step)

    def evaluate(self, step: int) -> bool:
        """Evaluate the weights after `step`, unless this was done before, and keep a copy of them if they are the best.

        Returns:
            True if the training ends here, because evaluations have not improved for too long.
        """
        evaluations = self.evaluations
        assert evaluations is not None
        if step not in evaluations.made:
            if self.version != step:
                self._give(step)
            evaluations.play(step)
        evaluations.keep_best(step, lambda folder: self._publish(folder, step))
        ends = evaluations.out_of_patience(step)
        self.context.events.message(evaluations.report_line(step) + "; training ends here" * ends)
        return ends

    def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Add all metrics of `step` to the history and return them."""
        machine = self.context.machine
        whole = merged(
            trainer=metrics,
            batch=self._batch_metrics.pop(step, {}),
            numbers=self._numbers(step),
            evaluation=self.evaluations.history(step) if self.evaluations is not None else {},
            cpu=self._cpu.since() if "timing/step" in metrics else {},
            machine={"machine/ranks": float(machine.trainer.nodes * machine.trainer.processes)},
        )
        self.history.append(step, whole)
        return whole

    def complete_history(self, done: int) -> None:
        """Add rows of applied steps that the history lacks because of a crash. The trainer still has their metrics."""
        recorded = {row["step"] for row in self.history.read()}
        for step in sorted(set(range(1, done + 1)) - recorded):
            batch = self.batch(step, self._made(self.ROLLOUTS, step))
            self.record(step, self._of_trainer(done, partial(self._apply, step, batch)))

    def finish(self, folder: Path, last: int) -> None:
        """Write the final weights to `folder`.

        They are the weights of the best evaluation, or without evaluations the weights after step `last`.
        """
        if self.evaluations is None:
            self._publish(folder, last)
        else:
            self.evaluations.refuse_lost_weights(last)
            link_folder(self.evaluations.best_weights, folder)
        self.trainer.settle()

    def lineage(self, last: int) -> list[dict[str, Any]]:
        """Return one entry per step with the digests of its artifacts: rollouts, batch, skipped batch, and evaluation.

        Step 0 has only an evaluation.
        """
        evaluated = {} if self.evaluations is None else self.evaluations.made
        steps: list[dict[str, Any]] = []
        for step in range(last + 1):
            row = {}
            if step:
                row = {
                    "rollouts": self._made(self.ROLLOUTS, step).digest,
                    "batch": self._made(self.BATCHES, step).digest,
                }
            if step in self.skipped and (original := self.store.find(self.BATCHES, self._key(step))):
                row["skipped"] = original.digest
            if step in evaluated:
                row[EVALUATION] = evaluated[step].digest
            if row:
                steps.append({"step": step, **row})
        return steps

    def _publish(self, folder: Path, step: int) -> None:
        self._of_trainer(step, lambda: self.trainer.publish(folder, step))

    def _of_trainer(self, done: int, ask: Callable[[], T]) -> T:
        """Return the result of `ask`, a function that needs the trainer with the weights after step `done`.

        If the trainer dies, it is restarted and `ask` is called again; see `with_restarts`.
        """

        def replay(step: int) -> None:
            self._apply(step, self._made(self.BATCHES, step))

        return with_restarts(self.trainer, done, ask, replay, self.context.events)

    def _made(self, kind: str, step: int) -> Artifact:
        key = self._key_of(kind, step)
        if (made := self.store.find(kind, key)) is None:
            raise TrainerError(
                f"the {kind} of step {step} are missing",
                code="step_files_missing",
                where=str(self.store.home(kind, key)),
                remedy=f"run the training again from its beginning: --force {self.STAGE}",
            )
        return made

    def _key_of(self, kind: str, step: int) -> str:
        return self._key(step) + "-skipped" * (kind == self.BATCHES and step in self.skipped)

    def _key(self, step: int) -> str:
        return f"{self.context.fingerprint}-{step:05d}"

    def _write(self, kind: str, step: int, fill: Callable[[Path], None], **facts: Any) -> Artifact:
        return write_step(self.context, self.store, kind, self._key_of(kind, step), step, fill, **facts)
