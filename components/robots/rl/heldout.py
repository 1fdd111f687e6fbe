"""Evaluations during training: the same held-out episodes, played by the weights after some of the steps."""

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
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy

SIGNIFICANT = 0.05
"""A smaller p-value of McNemar's exact test says that a policy has become better, or worse."""


class RobotEvaluations(Evaluations):
    """Evaluations of held-out episodes in LIBERO, each compared, episode by episode, with that before step 1.

    Args:
        heldout: as `TrainLiberoEvaluationSettings.heldout_set` gives it.
        known: the tasks of each suite.
        policy: answers with the weights that are evaluated.
        digests: of what the training began with, by name.
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
        known: Mapping[str, Sequence[LiberoTask]],
        policy: MolmoAct2Policy,
        arenas: Sequence[SimulatorClient],
        digests: Mapping[str, str],
        context: StageContext,
        store: ArtifactStore,
        last: int,
    ) -> None:
        self._heldout, self._planned = heldout, plan_episodes(heldout, known)
        self._policy, self._arenas, self._digests = policy, arenas, digests
        super().__init__(heldout, context, store, last)

    def play(self, step: int) -> None:
        """Play every held-out episode by the weights after `step`, which the policy has, and write what it says.

        Episodes that an attempt finished before it was stopped are not played again.

        Raises:
            WorkerError: more episodes than may fail could not be played.
        """
        journal = self._context.workspace / self.KIND / f"{step:06d}.jsonl"
        total, undecoded = len(self._planned), self._policy.undecoded

        def told(finished: Collection[EpisodeOutcome], latest: EpisodeOutcome) -> None:
            solved = sum(outcome.success for outcome in finished) / len(finished)
            self._context.events.progress("evaluation", len(finished), total, success=solved)

        played = Evaluation(self._heldout, self._planned, EvaluationJournal(journal), told)
        results = collect_results(self._planned, played.run(self._policy, self._arenas))
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
        """The share of solved episodes, then how few actions an episode takes."""
        return metrics["success"], -metrics["steps"]

    def report_line(self, step: int) -> str:
        metrics = self.metrics[step]
        compared = f"; {judgement(metrics['gained'], metrics['lost'], metrics['p_value'])}" if step else ""
        return super().report_line(step) + compared


def judgement(gained: int, lost: int, p_value: float) -> str:
    """What McNemar's exact test says of a policy that solves `gained` episodes more than the first one, and `lost`
    that only that solved."""
    verdict = "no difference can be told yet"
    if p_value < SIGNIFICANT:
        verdict = "it is learning" if gained > lost else "it has become worse"
    return f"{gained} episodes gained and {lost} lost since the training began, p = {p_value:.2g}: {verdict}"
