"""An RL run, whatever it plays: the units of its steps as artifacts, each applied once."""

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
    """Units that can be repeated: rollouts and batches are artifacts, and step k is applied once.

    The batches are the write-ahead log: a trainer that restarts from its last checkpoint applies the batches since
    then, and a run that is started again finds its rollouts and batches.

    Args:
        trainer: applies the steps.
        evaluations: between steps; None: there are none.
    """

    ROLLOUTS: ClassVar[str]
    BATCHES: ClassVar[str]
    STAGE: ClassVar[str]
    skipped: frozenset[int] = frozenset()
    """Steps whose batches are left out."""

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
        """The step after which the weights were made that play now."""

    @abstractmethod
    def _play(self, step: int) -> Artifact:
        """Collect the rollouts of `step` and write them."""

    @abstractmethod
    def _build(self, step: int, rollouts: Artifact) -> tuple[BuiltBatch[Any], dict[str, str]]:
        """Return the batch of `step`, and the digests of further inputs by name."""

    @abstractmethod
    def _write_samples(self, folder: Path, samples: Sequence[Any]) -> None:
        """Write the table of a batch."""

    @abstractmethod
    def _apply(self, step: int, batch: Artifact) -> dict[str, float]:
        """Have the trainer apply `step`, and return its metrics."""

    @abstractmethod
    def _give(self, version: int) -> None:
        """Bring the weights after step `version` to what plays."""

    @abstractmethod
    def _refuse_disagreement(self) -> None:
        """Compare the trainer's log-probs with the sampler's before step 1.

        Raises:
            MismatchError: they differ.
        """

    @abstractmethod
    def _numbers(self, step: int) -> dict[str, float]:
        """Return what the rollouts of `step` and the machine add to its record."""

    def resume(self, done: int) -> None:
        """Continue after step `done`, the last one that the trainer has saved."""
        if done:
            self.context.events.message(f"resuming after step {done}")
            self.complete_history(done)
            self.sync(done)

    def train_into(self, out: Path, done: int) -> tuple[int, list[dict[str, float]], dict[str, float]]:
        """Train, and write the checkpoint, `history.json` and `lineage.json` to `out`.

        Returns the last step, the history and the summary of the best evaluation, empty without evaluations.
        """
        last = self.train_from(done)
        self.finish(out / CHECKPOINT, last)
        history = self.history.read()
        write_json(out / "history.json", history)
        write_json(out / "lineage.json", self.lineage(last))
        return last, history, self.evaluations.summary() if self.evaluations is not None else {}

    def train_from(self, done: int) -> int:
        """Make all steps after `done`; before the first one trainer and sampler have to agree.

        Returns the last step: less than the planned one if an evaluation ended the training.

        Raises:
            DataError: the weights of the best evaluation are gone.
            MismatchError: trainer and sampler do not agree.
        """
        units, events, evaluations = self.context.units, self.context.events, self.evaluations
        if evaluations is not None:
            if evaluations.due(done):  # before the pre-flight, which leaves the sampler as it is without evaluations
                ends = units.submit(f"evaluation-{done:05d}", self.evaluate, done).result()
                events.metrics(evaluations.complete(self.history, done), done)
                if ends:
                    return done
            evaluations.refuse_lost_weights(done)
        if done == 0:
            self._refuse_disagreement()
        return run_loop(self, done + 1, self.plan, units, events)

    def rollouts(self, step: int) -> Artifact:
        """Return the rollouts of `step`, which are collected if the store has none."""
        return self.store.find(self.ROLLOUTS, self._key(step)) or self._play(step)

    @abstractmethod
    def wait_for_rollouts(self, step: int) -> None:
        """Hurry the rollouts of `step`: nothing goes on without them."""

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        """Return the training samples of `step` with their advantages."""
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
        """Apply `step`."""
        return self._of_trainer(step - 1, lambda: self._apply(step, batch))

    def save(self, step: int) -> None:
        """Write a checkpoint, if one is due after `step`."""
        if step % self.plan.save_every == 0 or step == self.plan.last:
            self._of_trainer(step, self.trainer.save)

    def sync(self, version: int) -> None:
        """Bring the weights after step `version` to what plays, unless all that they would sample is made."""
        count = (self.plan.sync_every or self.plan.last) + self.plan.max_staleness
        if not all(self.store.find(self.ROLLOUTS, self._key(version + 1 + number)) for number in range(count)):
            self._give(version)

    def evaluates(self, step: int) -> bool:
        """Tell whether the weights after `step` are evaluated."""
        return self.evaluations is not None and self.evaluations.due(step)

    def evaluate(self, step: int) -> bool:
        """Evaluate the weights after `step`, unless that was done, and keep them if they are the best.

        Returns whether training ends here.
        """
        evaluations = self.evaluations
        assert evaluations is not None
        if step not in evaluations.made:
            if self.version != step:
                self._give(step)
            evaluations.play(step)
        evaluations.keep_best(step, lambda folder: self._publish(folder, step))
        ends = evaluations.out_of_patience(step)
        self.context.events.message(evaluations.said(step) + "; training ends here" * ends)
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
            machine={"machine/ranks": float(machine.trainer_nodes * machine.trainer_processes)},
        )
        self.history.append(step, whole)
        return whole

    def complete_history(self, done: int) -> None:
        """Record the applied steps that a crash kept out of the history; the trainer still knows their metrics."""
        recorded = {row["step"] for row in self.history.read()}
        for step in sorted(set(range(1, done + 1)) - recorded):
            batch = self.batch(step, self._made(self.ROLLOUTS, step))
            self.record(step, self._of_trainer(done, partial(self._apply, step, batch)))

    def finish(self, folder: Path, last: int) -> None:
        """Write the weights of the best evaluation to `folder`; without evaluations those after step `last`."""
        if self.evaluations is None:
            self._publish(folder, last)
        else:
            self.evaluations.refuse_lost_weights(last)
            link_folder(self.evaluations.best_weights, folder)
        self.trainer.settle()

    def lineage(self, last: int) -> list[dict[str, Any]]:
        """Return, for each step, the digests of its rollouts, its batch, a batch that was made and then skipped, and
        its evaluation. The first evaluation is at step 0."""
        evaluated = {} if self.evaluations is None else self.evaluations.made
        steps: list[dict[str, Any]] = []
        for step in range(last + 1):
            row = {}
            if step:
                row = {
                    "rollouts": self._made(self.ROLLOUTS, step).digest,
                    "batch": self._made(self.BATCHES, step).digest,
                }
            if step in self.skipped and (poisoned := self.store.find(self.BATCHES, self._key(step))):
                row["skipped"] = poisoned.digest
            if step in evaluated:
                row[EVALUATION] = evaluated[step].digest
            if row:
                steps.append({"step": step, **row})
        return steps

    def _publish(self, folder: Path, step: int) -> None:
        self._of_trainer(step, lambda: self.trainer.publish(folder, step))

    def _of_trainer(self, done: int, ask: Callable[[], T]) -> T:
        """Return the answer of a trainer that has the weights after step `done`; if it dies, it replays its steps."""

        def replay(step: int) -> None:
            self._apply(step, self._made(self.BATCHES, step))

        return with_restarts(self.trainer, done, ask, replay, self.context.events)

    def _made(self, kind: str, step: int) -> Artifact:
        key = self._key_of(kind, step)
        if (made := self.store.find(kind, key)) is None:
            raise TrainerError(
                f"{kind} of step {step} are gone",
                code="step_files_missing",
                where=str(self.store.home(kind, key)),
                remedy=f"start the run again from its beginning: --force {self.STAGE}",
            )
        return made

    def _key_of(self, kind: str, step: int) -> str:
        return self._key(step) + "-skipped" * (kind == self.BATCHES and step in self.skipped)

    def _key(self, step: int) -> str:
        return f"{self.context.fingerprint}-{step:05d}"

    def _write(self, kind: str, step: int, fill: Callable[[Path], None], **facts: Any) -> Artifact:
        return write_step(self.context, self.store, kind, self._key_of(kind, step), step, fill, **facts)
