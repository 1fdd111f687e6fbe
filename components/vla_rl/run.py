"""One run: the units of its steps, on a policy and simulators here and a trainer service that it holds open."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from armature.components.artifacts.disk import link_folder
from armature.components.artifacts.history import History
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import MismatchError, TrainerError
from armature.components.contracts.metrics import merged, metrics_below
from armature.components.contracts.rollouts import Failure
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.environments.libero.tasks import LiberoTask
from armature.components.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.rl.cpu import CpuTimes
from armature.components.rl.loop import Ahead, run_loop
from armature.components.rollouts.collect import failures_said
from armature.components.rollouts.table import FAILURES_FILE, read_failures, write_failures
from armature.components.training.client import with_restarts
from armature.components.vla_rl.batch import build_batch, groups_that_differ
from armature.components.vla_rl.client import RobotRLTrainerClient
from armature.components.vla_rl.collect import Collector
from armature.components.vla_rl.panel import RobotEvaluations
from armature.components.vla_rl.schedule import plan_step
from armature.components.vla_rl.settings import GAE, RewardWeighted, TrainVLARLSettings
from armature.components.vla_rl.table import Answer, read_rollouts, with_advantage, write_batch, write_rollouts

BATCH_METRICS = "metrics.json"
ROLLOUTS, BATCHES = "robot-rollouts", "robot-batches"
EVALUATION = "evaluation"
T = TypeVar("T")


class RobotRLRun:
    """Units that can be asked again: rollouts and batches are artifacts, and step k is applied once.

    As in `armature.components.rl.run`, the batches are the write-ahead log: a trainer that comes back from its last
    checkpoint is given those since then, and a run that is started again finds its rollouts and batches made.

    Args:
        policy: has the weights that the run begins with.
        tasks: of the suite.
        evaluations: of the same weights; None: there are none during the training.
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
        evaluations: RobotEvaluations | None = None,
    ) -> None:
        self.settings, self.context, self.store, self.trainer = settings, context, store, trainer
        self._policy, self._tasks, self._collector, self._start = policy, tasks, collector, start
        self.history = History(context.workspace / "history.jsonl")
        self.evaluations = evaluations
        self._version, self._cpu = 0, CpuTimes()
        self._played: dict[int, dict[str, float]] = {}
        advantage = settings.trainer.advantage
        self._bootstrap = isinstance(advantage, GAE) and advantage.bootstrap_truncated
        if isinstance(advantage, GAE):
            policy.add_value_head(settings.trainer.seed)

    def train_all(self) -> int:
        """All steps that the newest checkpoint lacks; before the first one trainer and sampler have to agree.

        Returns the last step: less than `max_steps` where the evaluations ended the training.

        Raises:
            DataError: the weights of the best evaluation are gone.
            MismatchError: trainer and sampler do not agree.
        """
        units, events = self.context.units, self.context.events
        done, last = self.trainer.resume(), self.settings.trainer.max_steps
        if done:
            events.message(f"resuming after step {done}")
            self._complete_history(done)
            self.sync(done)
        if self.evaluates(done):
            ends = units.submit(f"evaluation-{done:05d}", self.evaluate, done).result()
            assert self.evaluations is not None
            events.metrics(self.evaluations.complete(self.history, done), done)
            if ends:
                return done
        if self.evaluations is not None:
            self.evaluations.refuse_lost_weights(done)
        if not done and not isinstance(self.settings.trainer.objective, RewardWeighted):
            self._preflight()
        return run_loop(self, done + 1, last, Ahead(self.settings.rollouts.max_staleness), units, events)

    def rollouts(self, step: int) -> Artifact:
        """The rollouts of `step`, found or collected by the weights that the policy has: those after the step before,
        or with `max_staleness` after the one before that."""
        if made := self.store.find(ROLLOUTS, self._key(step)):
            return made
        plan, answers, failures, episodes = self.settings.rollouts, list[Answer](), list[Failure](), 0
        lost = self._collector.lost
        self._collector.times.since()
        for number in range(plan.max_rounds):
            groups = plan_step(plan, self._tasks, step, number)
            found = self._collector.collect(groups, step, self._version, self._bootstrap)
            answers, failures = answers + found.answers, failures + found.failures
            episodes += sum(map(len, groups))
            if len(groups_that_differ(answers)) >= plan.groups_per_step:
                break
        if lost := self._collector.lost - lost:
            self.context.events.message(
                f"step {step}: {lost} attempts at episodes were lost with their simulator and begun again"
            )
        if failures:
            self.context.events.message(failures_said(failures, episodes, f"step {step}"))
        self._played[step] = self._collector.times.since()

        def fill(folder: Path) -> None:
            write_rollouts(folder, answers)
            if failures:
                write_failures(folder, failures)
            rows = {"answers": len(answers), "episodes": episodes}
            drops = dict(Counter(each.reason for each in failures))
            self._describe(folder, ROLLOUTS, step, rows, drops, {"policy": self._start.digest})

        return self._said(self.store.write(ROLLOUTS, self._key(step), fill), step)

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        """The training samples of `step` with their advantages."""
        if made := self.store.find(BATCHES, self._key(step)):
            return made
        plan, weighting = self.settings.rollouts, self.settings.trainer.weighting
        wanted = plan.groups_per_step if plan.max_rounds > 1 else None
        replayed = weighting.earlier_steps if isinstance(weighting, RewardWeighted) else 0
        earlier = [self._made(ROLLOUTS, number) for number in range(max(1, step - replayed), step)]
        before = [answer for made in earlier for answer in read_rollouts(made.path)]
        failures = read_failures(rollouts.path) if (rollouts.path / FAILURES_FILE).is_file() else ()
        built = build_batch(read_rollouts(rollouts.path), weighting, wanted, failures, before)
        if not built.samples:
            solved = built.metrics["success"]
            why = f"the episodes of each group all earned the same, and {solved:.0%} of all were solved"
            hard, advice = "too hard or too easy", "reward progress, or play larger groups"
            if isinstance(weighting, RewardWeighted):
                why, hard = "no episode was solved", "too hard"
                advice = "play more episodes, or reward progress and set trainer.objective.beta"
            self.context.events.message(
                f"warning: step {step} changes no weight: {why}. Where that stays so, the tasks are {hard} for the "
                f"policy: imitate longer, {advice}"
            )
        metrics = merged(batch=built.metrics, drops=metrics_below("drops", built.drops))

        def fill(folder: Path) -> None:
            write_batch(folder, built.samples)
            (folder / BATCH_METRICS).write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")
            rows = {"samples": len(built.samples)}
            inputs = {"rollouts": rollouts.digest}
            inputs |= {f"rollouts of {len(earlier) - index} before": made.digest for index, made in enumerate(earlier)}
            self._describe(folder, BATCHES, step, rows, dict(built.drops), inputs)

        return self._said(self.store.write(BATCHES, self._key(step), fill), step)

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        """Apply `step`; its metrics, with those of its rollouts."""
        own = json.loads((batch.path / BATCH_METRICS).read_text())
        return merged(batch=own, trainer=self._of_trainer(step - 1, lambda: self.trainer.step(step, batch.path)))

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
        self._version = version
        for other in weights.iterdir():
            if other != folder:
                shutil.rmtree(other)

    def awaits(self, step: int) -> None: ...

    def evaluates(self, step: int) -> bool:
        """Whether the panel is played by the weights after `step`."""
        return self.evaluations is not None and self.evaluations.due(step)

    def evaluate(self, step: int) -> bool:
        """Play the panel by the weights after `step`, unless that was done; keep the weights if they are the best.

        Returns whether training ends here.
        """
        evaluations = self.evaluations
        assert evaluations is not None
        if step not in evaluations.made:
            if self._version != step:
                self.sync(step)
            evaluations.play(step)
        evaluations.keep_best(step, lambda folder: self._of_trainer(step, lambda: self.trainer.publish(folder, step)))
        ends = evaluations.out_of_patience(step)
        self.context.events.message(evaluations.said(step) + "; training ends here" * ends)
        return ends

    def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        here: dict[str, float] = {}
        if "timing/step" in metrics:
            machine = self.context.machine
            here = self._cpu.since() | {
                "machine/simulators": len(self._collector.arenas),
                "machine/ranks": machine.trainer_nodes * machine.trainer_processes,
                "policy/rows_per_pass": self._policy.rows_per_pass,
            }
        whole = merged(
            trainer=metrics,
            rollouts=self._played.pop(step, {}),
            machine=here,
            evaluation=self.evaluations.history(step) if self.evaluations is not None else {},
        )
        self.history.append(step, whole)
        return whole

    def finish(self, folder: Path, last: int) -> None:
        """Write the policy, which needs nothing else: that of the best evaluation, else that after step `last`."""
        if self.evaluations is None:
            self._of_trainer(last, lambda: self.trainer.publish(folder, last))
        else:
            self.evaluations.refuse_lost_weights(last)
            link_folder(self.evaluations.best_weights, folder)
        self.trainer.finish()

    def lineage(self, last: int) -> list[dict[str, Any]]:
        """The digests of the rollouts and the batch of every step, and of evaluations, of which the first is of step
        0."""
        played = {} if self.evaluations is None else self.evaluations.made
        steps: list[dict[str, Any]] = []
        for step in range(last + 1):
            kinds = {"rollouts": ROLLOUTS, "batch": BATCHES} if step else {}
            row = {name: self._made(kind, step).digest for name, kind in kinds.items()}
            if step in played:
                row[EVALUATION] = played[step].digest
            if row:
                steps.append({"step": step, **row})
        return steps

    def _preflight(self) -> None:
        """Play a group, or another while all episodes fail, and compare the probabilities of its answers with the
        trainer's.

        Raises:
            MismatchError: a ratio is too far from 1.
            WorkerError: as many episodes failed as never may in a step.
        """
        plan, answers, failures = self.settings.rollouts, list[Answer](), list[Failure]()
        most = int(plan.failed_fraction * plan.groups_per_step * plan.group_size)
        while not answers:
            groups = plan_step(plan, self._tasks, 0, len(failures) // plan.group_size)
            found = self._collector.collect(groups, 0, 0, bootstrap=False, may_fail=most - len(failures))
            answers, failures = found.answers, failures + found.failures
        if failures:
            planned = len({each.episode_id for each in answers}) + len(failures)
            self.context.events.message(failures_said(failures, planned, "pre-flight"))
        folder = self.context.workspace / "preflight"
        folder.mkdir(exist_ok=True)
        write_batch(folder, [with_advantage(answer, 0.0) for answer in answers])
        scores = self._of_trainer(0, lambda: self.trainer.score(folder))
        worst = refuse_ratios(
            scores, [float(answer.logprobs.sum()) for answer in answers], self.settings.preflight.max_ratio_error
        )
        self.context.events.message(
            f"pre-flight: the trainer gives {len(answers)} answers the probabilities that they were sampled with, "
            f"ratios within {worst:.1e} of 1"
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
                code="step_files_missing",
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


def refuse_ratios(scores: Sequence[float], sampled: Sequence[float], most: float) -> float:
    """The largest |ratio - 1|, trainer over sampler.

    Args:
        scores, sampled: log-probs of the same answers, by the trainer and by the sampler.

    Raises:
        MismatchError: it is larger than `most`, or one is not a number.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        worst = float(np.abs(np.expm1(np.subtract(scores, sampled))).max())
    if not worst <= most:
        raise MismatchError(
            f"trainer and sampler disagree: a probability ratio is {worst:.3g} away from 1, {most:g} is allowed",
            code="ratios_mismatch",
            where="pre-flight, preflight.max_ratio_error",
            remedy="rows of other batches differ in their last bits: on a CPU set trainer.micro_batch_size = 1, as "
            "answers are sampled there; on a GPU allow 1e-4 in fp32 (policy.dtype), where 2e-5 was seen, more in bf16",
        )
    return worst
