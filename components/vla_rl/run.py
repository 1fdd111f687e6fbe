"""One run: the units of its steps, on a policy and simulators here and a trainer service that it holds open."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from components.artifacts.history import History
from components.artifacts.manifest import write_manifest
from components.artifacts.store import ArtifactStore
from components.contracts.errors import MismatchError, TrainerError
from components.contracts.stages import Artifact, StageContext
from components.environments.libero.tasks import LiberoTask
from components.policies.molmoact2.policy import MolmoAct2Policy
from components.rl.loop import Ahead, run_loop
from components.training.restarts import with_restarts
from components.vla_rl.batch import build_batch
from components.vla_rl.client import RobotRLTrainerClient
from components.vla_rl.collect import Collector
from components.vla_rl.schedule import plan_step
from components.vla_rl.settings import GAE, TrainVLARLSettings
from components.vla_rl.table import read_rollouts, with_advantage, write_batch, write_rollouts

BATCH_METRICS = "metrics.json"
ROLLOUTS, BATCHES = "robot-rollouts", "robot-batches"
T = TypeVar("T")


class RobotRLRun:
    """Units that can be asked again: rollouts and batches are artifacts, and step k is applied once.

    As in `components.rl.run`, the batches are the write-ahead log: a trainer that comes back from its last checkpoint
    is given those since then, and a run that is started again finds its rollouts and batches made.

    Args:
        policy: has the weights that the run begins with.
        tasks: of the suite.
    """

    def __init__(
        self,
        settings: TrainVLARLSettings,
        context: StageContext,
        store: ArtifactStore,
        policy: MolmoAct2Policy,
        tasks: Sequence[LiberoTask],
        collector: Collector,
        trainer: RobotRLTrainerClient,
        start: Artifact,
    ) -> None:
        self.settings, self.context, self.store, self.trainer = settings, context, store, trainer
        self._policy, self._tasks, self._collector, self._start = policy, tasks, collector, start
        self.history = History(context.workspace / "history.jsonl")
        advantage = settings.trainer.advantage
        self._bootstrap = isinstance(advantage, GAE) and advantage.bootstrap_truncated
        if isinstance(advantage, GAE):
            policy.add_value_head(settings.trainer.seed)

    def train_all(self) -> None:
        """All steps that the newest checkpoint lacks; before the first one trainer and sampler have to agree.

        Raises:
            MismatchError: they do not.
        """
        done, last = self.trainer.resume(), self.settings.trainer.max_steps
        if done:
            self.context.events.message(f"resuming after step {done}")
            self._complete_history(done)
            self.sync(done)
        else:
            self._preflight()
        run_loop(self, done + 1, last, Ahead(), self.context.units, self.context.events)

    def rollouts(self, step: int) -> Artifact:
        """The rollouts of `step`, found or collected by the weights after the step before."""
        if made := self.store.find(ROLLOUTS, self._key(step)):
            return made
        groups = plan_step(self.settings.rollouts, self._tasks, step)
        answers = self._collector.collect(groups, step, step - 1, self._bootstrap)

        def fill(folder: Path) -> None:
            write_rollouts(folder, answers)
            rows = {"answers": len(answers), "episodes": sum(map(len, groups))}
            self._describe(folder, ROLLOUTS, step, rows, {}, {"policy": self._start.digest})

        return self._said(self.store.write(ROLLOUTS, self._key(step), fill), step)

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        """The training samples of `step` with their advantages."""
        if made := self.store.find(BATCHES, self._key(step)):
            return made
        built = build_batch(read_rollouts(rollouts.path), self.settings.trainer.advantage)
        metrics = built.metrics | {f"drops/{reason}": float(count) for reason, count in built.drops.items()}

        def fill(folder: Path) -> None:
            write_batch(folder, built.samples)
            (folder / BATCH_METRICS).write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")
            rows = {"samples": len(built.samples)}
            self._describe(folder, BATCHES, step, rows, dict(built.drops), {"rollouts": rollouts.digest})

        return self._said(self.store.write(BATCHES, self._key(step), fill), step)

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        """Apply `step`; its metrics, with those of its rollouts."""
        own = json.loads((batch.path / BATCH_METRICS).read_text())
        return own | self._of_trainer(step - 1, lambda: self.trainer.step(step, batch.path))

    def save(self, step: int) -> None:
        """Write a checkpoint, if one is due after `step`."""
        if step % self.settings.trainer.save_every == 0 or step == self.settings.trainer.max_steps:
            self._of_trainer(step, self.trainer.save)

    def sync(self, version: int) -> None:
        """Give the policy the weights after step `version`."""
        weights = self.context.workspace / "weights"
        folder = weights / f"{version:06d}"
        self._of_trainer(version, lambda: self.trainer.publish(folder, version))
        self._policy.load_weights(folder)
        for other in weights.iterdir():
            if other != folder:
                shutil.rmtree(other)

    def evaluates(self, step: int) -> bool:
        """Never: the flow evaluates before and after."""
        return False

    def evaluate(self, step: int) -> bool:
        """Nothing is played, and training goes on."""
        return False

    def record(self, step: int, metrics: dict[str, float]) -> None:
        self.history.append(step, metrics)

    def finish(self, folder: Path) -> None:
        """Write the policy, which needs nothing else."""
        last = self.settings.trainer.max_steps
        self._of_trainer(last, lambda: self.trainer.publish(folder, last))
        self.trainer.finish()

    def lineage(self) -> list[dict[str, Any]]:
        """The digests of the rollouts and the batch of every step."""
        return [
            {"step": step, "rollouts": self._made(ROLLOUTS, step).digest, "batch": self._made(BATCHES, step).digest}
            for step in range(1, self.settings.trainer.max_steps + 1)
        ]

    def _preflight(self) -> None:
        """Play one group, and compare the probabilities of its answers with the trainer's.

        Raises:
            MismatchError: a ratio is too far from 1.
        """
        answers = self._collector.collect(plan_step(self.settings.rollouts, self._tasks, 0), 0, 0, bootstrap=False)
        folder = self.context.workspace / "preflight"
        folder.mkdir(exist_ok=True)
        write_batch(folder, [with_advantage(answer, 0.0) for answer in answers])
        scores = self._of_trainer(0, lambda: self.trainer.score(folder))
        sampled = [float(answer.logprobs.sum()) for answer in answers]
        errors = [abs(math.expm1(score - own)) for score, own in zip(scores, sampled, strict=True)]
        refuse_ratios(errors, self.settings.preflight.max_ratio_error)
        self.context.events.message(
            f"pre-flight: the trainer gives {len(errors)} answers the probabilities that they were sampled with, "
            f"ratios within {max(errors):.1e} of 1"
        )

    def _of_trainer(self, done: int, ask: Callable[[], T]) -> T:
        """The answer of a trainer that has the weights after step `done`, which it replays if it dies."""

        def replay(step: int) -> None:
            self.trainer.step(step, self._made(BATCHES, step).path)

        return with_restarts(self.trainer, done, ask, replay, self.context.events)

    def _complete_history(self, done: int) -> None:
        """Record the applied steps that a crash kept out of the history; the trainer still knows their metrics."""
        recorded = {row["step"] for row in self.history.read()}
        for step in sorted(set(range(1, done + 1)) - recorded):
            self.record(step, self.train(step, self._made(BATCHES, step)))

    def _made(self, kind: str, step: int) -> Artifact:
        made = self.store.find(kind, self._key(step))
        if made is None:
            raise TrainerError(
                f"{kind} of step {step} are gone",
                where=str(self.store.home(kind, self._key(step))),
                remedy="start the run again from its beginning: --force train-vla-rl",
            )
        return made

    def _key(self, step: int) -> str:
        return f"{self.context.fingerprint}-{step:05d}"

    def _said(self, artifact: Artifact, step: int) -> Artifact:
        self.context.events.artifact(artifact, "output", step)
        return artifact

    def _describe(
        self, folder: Path, kind: str, step: int, rows: dict[str, int], drops: dict[str, int], inputs: dict[str, str]
    ) -> None:
        settings = {"run": self.context.fingerprint, "step": step}
        write_manifest(folder, kind=kind, kind_version=1, rows=rows, drops=drops, inputs=inputs, settings=settings)


def refuse_ratios(errors: Sequence[float], most: float) -> None:
    """
    Args:
        errors: |ratio - 1| of answers, trainer over sampler.

    Raises:
        MismatchError: one is larger than `most`, or not a number.
    """
    if not max(errors) <= most:
        raise MismatchError(
            f"trainer and sampler disagree: a probability ratio is {max(errors):.3g} away from 1, {most:g} is allowed",
            where="pre-flight, preflight.max_ratio_error",
            remedy="rows of other batches differ in their last bits: on a CPU set trainer.micro_batch_size = 1, as "
            "answers are sampled there; else set policy.dtype = 'float32', or allow more",
        )
