"""Evaluations during training: the same held-out episodes are played with the weights after some of the steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.stages import StageContext
from armature.components.rl.evaluations import Evaluations, Measure
from armature.components.robots.evaluation.compare import compare_results
from armature.components.robots.evaluation.episode import EpisodeOutcome, EvaluationJournal, SimulatorClient
from armature.components.robots.evaluation.results import collect_results, metrics, read_results, write_results
from armature.components.robots.evaluation.run import Evaluation
from armature.components.robots.evaluation.schedule import plan_episodes
from armature.components.robots.evaluation.settings import TrainLiberoEvaluationSettings
from armature.components.robots.libero.tasks import LiberoTask
from armature.components.robots.policies.player import FlowPolicy

SIGNIFICANT = 0.05
"""Significance level of McNemar's exact test. With a smaller p-value the policy is reported as better or worse than
before training."""


class RobotEvaluations(Evaluations):
    """Evaluations of held-out LIBERO episodes, each compared episode by episode with the evaluation before step 1.

    Args:
        heldout: the settings, see `TrainLiberoEvaluationSettings.heldout_set`.
        tasks: the tasks of each suite, by the suite's name.
        policy: the policy whose current weights are evaluated.
        digests: digests of the training's inputs, by name.
        last: the last step of the run.
    """

    KIND, STAGE, RATE, SUMMARY = "robot-evaluations", "train-vla-rl", "success", ("episodes",)
    HISTORY_KEYS = {  # noqa: RUF012
        "heldout/success": "success",
        "heldout/low": "success_low",
        "heldout/high": "success_high",
        "heldout/steps": "steps",
        "heldout/episodes": "episodes",
        "heldout/failed": "failed",
        "heldout/gained": "gained",
        "heldout/lost": "lost",
        "heldout/p_value": "p_value",
    }

    def __init__(
        self,
        heldout: TrainLiberoEvaluationSettings,
        tasks: Mapping[str, Sequence[LiberoTask]],
        policy: FlowPolicy,
        processes: Sequence[SimulatorClient],
        digests: Mapping[str, str],
        context: StageContext,
        store: ArtifactStore,
        last: int,
    ) -> None:
        self._heldout, self._planned = heldout, plan_episodes(heldout, tasks)
        self._policy, self._processes, self._digests = policy, processes, digests
        super().__init__(heldout, context, store, last)

    def play(self, step: int) -> None:
        """Play all held-out episodes with the policy's current weights, and write the results.

        The current weights must be the weights after `step`.

        Episodes that an interrupted attempt has finished are not played again.

        Raises:
            WorkerError: more episodes than allowed could not be played.
        """
        journal = self._context.workspace / self.KIND / f"{step:06d}.jsonl"
        total, undecoded = len(self._planned), self._policy.undecoded

        def on_outcome(finished: Collection[EpisodeOutcome], latest: EpisodeOutcome) -> None:
            solved = sum(outcome.success for outcome in finished) / len(finished)
            self._context.events.progress("evaluation", len(finished), total, success=solved)

        played = Evaluation(self._heldout, self._planned, EvaluationJournal(journal), on_outcome)
        results = collect_results(self._planned, played.run(self._policy, self._processes))
        numbers = metrics(results) | {"steps": fmean(result.steps for result in results)}
        if step:
            paired = compare_results(read_results(self.made[0].path), results)
            numbers |= {"gained": paired.only_second, "lost": paired.only_first, "p_value": paired.p_value}
        drops = {
            "episodes not played": int(numbers["failed"]),
            "answers without actions": self._policy.undecoded - undecoded,
        }
        counted = {reason: count for reason, count in drops.items() if count}
        rows = {"episodes": len(results)}
        fill = partial(write_results, results=results)
        self._write(step, numbers, fill, rows=rows, drops=counted, inputs=self._digests)
        journal.unlink()

    def measure(self, metrics: Mapping[str, Any]) -> Measure:
        """Return the criterion by which the best step is chosen: first the success rate, then the negative mean number
        of actions."""
        return metrics["success"], -metrics["steps"]

    def report_line(self, step: int) -> str:
        metrics = self.metrics[step]
        compared = f"; {judgement(metrics['gained'], metrics['lost'], metrics['p_value'])}" if step else ""
        return super().report_line(step) + compared


def judgement(gained: int, lost: int, p_value: float) -> str:
    """Return a sentence about the change since the first evaluation, by McNemar's exact test.

    Args:
        gained: episodes that only the current policy solves. lost: episodes that only the first policy solved.
    """
    verdict = "no significant difference yet"
    if p_value < SIGNIFICANT:
        verdict = "the policy is learning" if gained > lost else "the policy has become worse"
    return f"{gained} episodes gained and {lost} lost since the training began, p = {p_value:.2g}: {verdict}"
