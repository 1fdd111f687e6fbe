"""Reinforcement learning of a robot policy in LIBERO: rollouts, batches, weight sync and the check of the trainer."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import MismatchError
from armature.components.contracts.rollouts import Failure
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.rl.base import TrainingRun
from armature.components.rl.loop import LoopPlan
from armature.components.robots.libero.tasks import LiberoTask
from armature.components.robots.policies.player import FlowPolicy
from armature.components.robots.rl.batch import build_batch, differing_groups
from armature.components.robots.rl.client import RobotRLTrainerClient
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.heldout import RobotEvaluations
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.settings import GAE, RewardWeighted, TrainVLARLSettings
from armature.components.robots.rl.table import (
    ActionChunk,
    ActionChunkSample,
    read_rollouts,
    with_advantage,
    write_batch,
    write_rollouts,
)
from armature.components.rollouts.batches.table import BuiltBatch
from armature.components.rollouts.collect import failures_said
from armature.components.rollouts.table import FAILURES_FILE, read_failures, write_failures


class RobotRLRun(TrainingRun):
    """Training run whose policy plays in simulators and lives in this process; see `TrainingRun`.

    Args:
        policy: the policy with the initial weights of the run.
        tasks: all tasks of the suite.
        start: the artifact that the policy was opened from.
        evaluations: evaluations during training, of the same policy; None: no evaluations.
    """

    ROLLOUTS, BATCHES, STAGE = "robot-rollouts", "robot-batches", "train-vla-rl"
    trainer: RobotRLTrainerClient

    def __init__(
        self,
        settings: TrainVLARLSettings,
        context: StageContext,
        store: ArtifactStore,
        policy: FlowPolicy,
        tasks: Sequence[LiberoTask],
        collector: Collector,
        trainer: RobotRLTrainerClient,
        start: Artifact,
        evaluations: RobotEvaluations | None = None,
    ) -> None:
        plan, last = settings.rollouts, settings.trainer.max_steps
        loop = LoopPlan(last, settings.trainer.save_every, plan.max_staleness)
        super().__init__(loop, context, store, trainer, evaluations)
        self.settings = settings
        self._policy, self._tasks, self._collector, self._start = policy, tasks, collector, start
        self._version = 0
        self._play_times: dict[int, dict[str, float]] = {}
        advantage = settings.trainer.advantage
        self._bootstrap = isinstance(advantage, GAE) and advantage.bootstrap_truncated
        if isinstance(advantage, GAE):
            policy.add_value_head(settings.trainer.seed)

    @property
    def version(self) -> int:
        return self._version

    def wait_for_rollouts(self, step: int) -> None: ...

    def _play(self, step: int) -> Artifact:
        """Collect the rollouts of `step` with the policy's current weights.

        These are the weights after the previous step, or with `max_staleness` 1 after the step before that.
        """
        plan, answers, failures, episodes = self.settings.rollouts, list[ActionChunk](), list[Failure](), 0
        lost = self._collector.lost
        self._collector.times.since()
        for number in range(plan.max_rounds):
            groups = plan_step(plan, self._tasks, step, number)
            collected = self._collector.collect(groups, step, self._version, self._bootstrap)
            answers, failures = answers + collected.answers, failures + collected.failures
            episodes += sum(map(len, groups))
            if len(differing_groups(answers)) >= plan.groups_per_step:
                break
        if lost := self._collector.lost - lost:
            self.context.events.message(
                f"step {step}: {lost} attempts at episodes were lost with their simulator and repeated"
            )
        if failures:
            self.context.events.message(failures_said(failures, episodes, f"step {step}"))
        self._play_times[step] = self._collector.times.since()

        def fill(folder: Path) -> None:
            write_rollouts(folder, answers)
            if failures:
                write_failures(folder, failures)

        rows, drops = {"answers": len(answers), "episodes": episodes}, dict(Counter(each.reason for each in failures))
        return self._write(self.ROLLOUTS, step, fill, rows=rows, drops=drops, inputs={"policy": self._start.digest})

    def _build(self, step: int, rollouts: Artifact) -> tuple[BuiltBatch[ActionChunkSample], dict[str, str]]:
        failures = read_failures(rollouts.path) if (rollouts.path / FAILURES_FILE).is_file() else ()
        plan, weighting = self.settings.rollouts, self.settings.trainer.weighting
        wanted = plan.groups_per_step if plan.max_rounds > 1 else None
        replayed = weighting.earlier_steps if isinstance(weighting, RewardWeighted) else 0
        earlier = [self._made(self.ROLLOUTS, number) for number in range(max(1, step - replayed), step)]
        before = [answer for made in earlier for answer in read_rollouts(made.path)]
        built = build_batch(read_rollouts(rollouts.path), weighting, wanted, failures, before)
        if not built.samples:
            solved = built.metrics["success"]
            why = f"within each group all episodes earned the same; {solved:.0%} of all episodes were solved"
            hard, advice = "too hard or too easy", "use the reward progress, or play larger groups"
            if isinstance(weighting, RewardWeighted):
                why, hard = "no episode was solved", "too hard"
                advice = "play more episodes, or use the reward progress and set trainer.objective.beta"
            self.context.events.message(
                f"warning: step {step} changes no weight: {why}. If this continues, the tasks are {hard} "
                f"for the policy: train longer on demonstrations, {advice}"
            )
        return built, {f"rollouts of {len(earlier) - index} before": made.digest for index, made in enumerate(earlier)}

    def _write_samples(self, folder: Path, samples: Sequence[ActionChunkSample]) -> None:
        write_batch(folder, samples)

    def _apply(self, step: int, batch: Artifact) -> dict[str, float]:
        return self.trainer.step(step, batch.path)

    def _give(self, version: int) -> None:
        folder = self.weights / f"{version:06d}"
        self._publish(folder, version)
        self._policy.load_weights(folder)
        self._version = version
        for other in self.weights.iterdir():
            if other != folder:
                shutil.rmtree(other)

    def _numbers(self, step: int) -> dict[str, float]:
        machine = {
            "machine/simulators": len(self._collector.processes),
            "policy/rows_per_pass": self._policy.rows_per_pass,
        }
        return self._play_times.pop(step, {}) | machine

    def _refuse_disagreement(self) -> None:
        """Check, before the first step, that trainer and sampler compute the same probabilities for one group's chunks.

        If all episodes of a group fail, another group is played instead.

        Raises:
            MismatchError: a probability ratio is too far from 1.
            WorkerError: as many episodes failed as may fail in one step.
        """
        if isinstance(self.settings.trainer.objective, RewardWeighted):
            return  # this objective has no probability ratios
        plan, answers, failures = self.settings.rollouts, list[ActionChunk](), list[Failure]()
        most = int(plan.failed_fraction * plan.groups_per_step * plan.group_size)
        while not answers:
            groups = plan_step(plan, self._tasks, 0, len(failures) // plan.group_size)
            collected = self._collector.collect(groups, 0, 0, bootstrap=False, may_fail=most - len(failures))
            answers, failures = collected.answers, failures + collected.failures
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
            f"pre-flight: trainer and sampler agree on the probabilities of {len(answers)} action chunks, "
            f"ratios within {worst:.1e} of 1"
        )


def refuse_ratios(scores: Sequence[float], sampled: Sequence[float], most: float) -> float:
    """Return the largest |ratio - 1|, where ratio is the trainer's probability of a chunk over the sampler's.

    Args:
        scores, sampled: log-probs of the same chunks, by the trainer and by the sampler.
        most: largest value allowed.

    Raises:
        MismatchError: the largest |ratio - 1| exceeds `most`, or a ratio is not a number.

    Example:
        >>> refuse_ratios([-2.0, -3.0], [-2.0, -3.0], most=1e-5)
        0.0
    """
    with np.errstate(over="ignore", invalid="ignore"):
        worst = float(np.abs(np.expm1(np.subtract(scores, sampled))).max())
    if not worst <= most:
        raise MismatchError(
            f"trainer and sampler disagree: a probability ratio is {worst:.3g} away from 1, {most:g} is allowed",
            code="ratios_mismatch",
            where="pre-flight, preflight.max_ratio_error",
            remedy="results differ in their last bits when the batch differs: on a CPU set "
            "trainer.micro_batch_size = 1, as in sampling; on a GPU allow 1e-4 in fp32 (policy.dtype), where 2e-5 was "
            "measured, and more in bf16",
        )
    return worst
