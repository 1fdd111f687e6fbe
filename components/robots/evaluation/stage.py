"""The stages evaluate-libero (a policy plays LIBERO's suites) and compare-libero (two evaluations are compared)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from armature.components.contracts.metrics import write_json
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.machine.versions import policy_versions
from armature.components.robots.evaluation.settings import (
    CompareLiberoSettings,
    EvaluateLiberoStageSettings,
    PlayerSettings,
    PolicyEvaluationSettings,
)

if TYPE_CHECKING:
    from armature.components.contracts.machine import Machine
    from armature.components.contracts.robots import RobotPolicy
    from armature.components.contracts.settings import Settings
    from armature.components.robots.evaluation.episode import EpisodeOutcome, SimulatorClient
    from armature.components.robots.evaluation.page import LastFrame
    from armature.components.robots.evaluation.results import LiberoResult, PerturbedResult
    from armature.components.robots.evaluation.run import ManyPlayer
    from armature.components.robots.evaluation.schedule import EpisodeKey, PlannedEpisode
    from armature.components.robots.libero.processes import SimulatorProcess
    from armature.components.robots.libero.settings import SimulatorSettings
    from armature.components.robots.libero.tasks import LiberoTask

METRICS_FILE = "metrics.json"
JOURNAL_FILE = "episodes.jsonl"
COMPARISON_FILE = "comparison.json"
SHOWN = ("success", "success_low", "success_high", "difference")
"""Names of the metrics that are logged to the run for each perturbation. `metrics.json` has all metrics."""


def evaluate_libero(
    settings: EvaluateLiberoStageSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Evaluate the policy and write its results, metrics, videos and report.

    The files are `results.parquet`, `eval_info.json`, `metrics.json`, `videos/` and `report.html`. With perturbations
    there is also `perturbed.parquet`.

    Raises:
        WorkerError: more episodes than allowed could not be played.
        ConfigurationError: a task does not exist or cannot be simplified as asked, or the policy does not support the
            action mode.
    """
    from armature.components.robots.evaluation.opening import open_policy
    from armature.components.robots.evaluation.robot import libero_robot
    from armature.components.robots.evaluation.schedule import refuse_episodes
    from armature.components.robots.libero.tasks import suite_tasks

    plan, source = settings.evaluation, inputs["policy"].path
    refuse_episodes(plan, settings.simulator)
    tasks: dict[str, Sequence[LiberoTask]] = {suite: suite_tasks(suite) for suite in plan.suites}
    with (
        open_policy(source, libero_robot(settings.simulator), plan, context) as policy,
        open_simulators(settings.simulator, context.machine, plan) as processes,
    ):
        return evaluate_policy(policy, tasks, processes, settings, out, context)


@contextmanager
def open_simulators(
    settings: SimulatorSettings, machine: Machine, plan: PlayerSettings
) -> Iterator[list[SimulatorProcess]]:
    """Start the processes that play `plan.batch` episodes at once, and limit torch to `machine.threads` CPU threads."""
    from armature.components.robots.libero.processes import SimulatorProcess

    with torch_threads(machine), ExitStack() as opened:
        made = [
            SimulatorProcess(settings, machine.limits.environment_timeout, plan.play_broken_starts)
            for _ in range(min(machine.playing_processes, plan.batch))
        ]
        yield [opened.enter_context(process) for process in made]


@contextmanager
def torch_threads(machine: Machine) -> Iterator[None]:
    """Limit torch to `machine.threads` CPU threads within the block; with 0 threads torch's own number stays.

    The policy computes in this process, next to the simulators.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(machine.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def evaluate_policy(
    policy: RobotPolicy,
    tasks: Mapping[str, Sequence[LiberoTask]],
    processes: Sequence[SimulatorClient],
    settings: EvaluateLiberoStageSettings,
    out: Path,
    context: StageContext,
) -> StageReport:
    """Evaluate any policy and write all result files, see `evaluate_libero`. tasks: the tasks of each suite."""
    from armature.components.robots.evaluation.results import collect_perturbed, collect_results
    from armature.components.robots.evaluation.run import EpisodePlayer
    from armature.components.robots.evaluation.schedule import plan_episodes

    started, plan = time.monotonic(), settings.evaluation
    planned = plan_episodes(plan, tasks)
    outcomes = play_planned(policy, plan, planned, EpisodePlayer(processes, plan.batch, plan.attempts), context)
    results, perturbed = collect_results(planned, outcomes), collect_perturbed(planned, outcomes)
    every = {each.key: result for each, result in zip(planned, [*results, *perturbed], strict=True)}
    stills, differing = _film(settings, planned, outcomes, every, processes[0], out, context)
    seconds = time.monotonic() - started
    report = write_evaluation(policy, settings, results, outcomes, seconds, out, context, perturbed, stills)
    shown = {"videos that would show another ending": differing} if differing else {}
    return replace(report, drops={**report.drops, **shown})


def write_evaluation(
    policy: RobotPolicy,
    settings: Settings,
    results: Sequence[LiberoResult],
    outcomes: Mapping[EpisodeKey, EpisodeOutcome],
    seconds: float,
    out: Path,
    context: StageContext,
    perturbed: Sequence[PerturbedResult] = (),
    stills: Sequence[LastFrame] = (),
    title: str = "Evaluation in LIBERO",
) -> StageReport:
    """Write tables, metrics and the report of an evaluation, and log its metrics.

    Args:
        settings: settings of the stage. seconds: duration of the evaluation. title: first words of the report.
    """
    from armature.components.pages.report import write_report
    from armature.components.robots.evaluation.compare import all_metrics
    from armature.components.robots.evaluation.page import evaluation_report
    from armature.components.robots.evaluation.results import EVAL_INFO_FILE, eval_info, write_results

    write_results(out, results, perturbed)
    numbers = all_metrics(results, perturbed)
    videos = {still.key: still.video for still in stills}
    write_json(out / METRICS_FILE, numbers)
    write_json(out / EVAL_INFO_FILE, eval_info(results, videos, seconds))
    configuration = {"policy": policy.facts(), **settings.model_dump(mode="json")}
    page = evaluation_report(results, stills, configuration, {"JSON": EVAL_INFO_FILE}, perturbed, title)
    write_report(out / "report.html", page)
    shown = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
    changed = numbers.get("perturbations", {}).items()
    shown |= {f"perturbed/{label}/{key}": part[key] for label, part in changed for key in SHOWN}
    context.events.metrics(shown, 0)
    undecoded = getattr(policy, "undecoded", 0)  # only policies of ours predict action tokens
    if undecoded:
        context.events.message(f"{undecoded} answers of the policy could not be decoded to actions")
    drops = {
        "episodes not played": sum(result.failure is not None for result in [*results, *perturbed]),
        "attempts lost with their simulator": sum(outcome.lost for outcome in outcomes.values()),
        "answers without actions": undecoded,
    }
    counts = {"episodes": len(results), "perturbed episodes": len(perturbed), "videos": len(stills)}
    counts = {name: count for name, count in counts.items() if count or name != "perturbed episodes"}
    return StageReport(rows=counts, drops={reason: count for reason, count in drops.items() if count})


def play_planned(
    policy: RobotPolicy,
    plan: PolicyEvaluationSettings,
    planned: Sequence[PlannedEpisode],
    player: ManyPlayer,
    context: StageContext,
    action_dimensions: int = 7,
) -> Mapping[EpisodeKey, EpisodeOutcome]:
    """Play the episodes that the stage has not played yet, and return the outcomes of all."""
    from armature.components.robots.evaluation.episode import EvaluationJournal
    from armature.components.robots.evaluation.run import Evaluation

    def on_outcome(finished: Collection[EpisodeOutcome], latest: EpisodeOutcome) -> None:
        solved = sum(outcome.success for outcome in finished) / len(finished)
        context.events.progress("episodes", len(finished), len(planned), success=solved, steps=latest.steps)
        if latest.failure is not None:
            context.events.message(f"an episode could not be played: {latest.failure}")

    journal = EvaluationJournal(context.workspace / JOURNAL_FILE)
    return Evaluation(plan, planned, journal, on_outcome).run_with(policy, player, action_dimensions)


def _film(
    settings: EvaluateLiberoStageSettings,
    planned: Sequence[PlannedEpisode],
    outcomes: Mapping[EpisodeKey, EpisodeOutcome],
    results: Mapping[EpisodeKey, LiberoResult],
    process: SimulatorClient,
    out: Path,
    context: StageContext,
) -> tuple[list[LastFrame], int]:
    """Write the videos; return their last frames and the number of repetitions that ended differently."""
    from armature.components.robots.evaluation.page import LastFrame
    from armature.components.robots.evaluation.videos import chosen, differs, film, side_by_side, write_video

    plan = settings.evaluation
    picked = chosen(planned, outcomes, plan.videos_per_task)
    stills: list[LastFrame] = []
    differing = 0
    for done, (episode, played) in enumerate(film(picked, outcomes, process, plan.attempts), start=1):
        context.events.progress("videos", done, len(picked))
        if difference := differs(played, outcomes[episode.key]):
            differing += 1
            context.events.message(f"no video of {episode.name}: {difference}")
            continue
        path = write_video(out, episode, played.frames, plan.video_fps)
        stills.append(LastFrame(episode.key, results[episode.key], side_by_side(played.frames[-1]), path))
    return stills, differing


def compare_libero(
    settings: CompareLiberoSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Compare two evaluations and write `comparison.json`, side-by-side `videos/` and `report.html`.

    Raises:
        DataError: an input is not a LIBERO evaluation, or the two did not play the same episodes.
    """
    from armature.components.pages.report import write_report
    from armature.components.robots.evaluation.compare import compare_parts, compare_perturbed
    from armature.components.robots.evaluation.page import comparison_report
    from armature.components.robots.evaluation.results import read_perturbed, read_results
    from armature.components.robots.evaluation.videos import write_pairs

    one, other = (inputs[name].path for name in ("first", "second"))
    parts = compare_parts(read_results(one), read_results(other), settings.confidence)
    parts |= compare_perturbed(read_perturbed(one), read_perturbed(other), settings.confidence)
    write_json(out / COMPARISON_FILE, {name: {**asdict(part), "pairs": part.pairs} for name, part in parts.items()})
    names = (f"first, {inputs['first'].digest[:8]}", f"second, {inputs['second'].digest[:8]}")
    videos = write_pairs(one, other, out)
    write_report(out / "report.html", comparison_report(parts, names, settings.model_dump(mode="json"), videos))
    whole = parts["all"]
    context.events.metrics({"difference": whole.difference, "p_value": whole.p_value}, 0)
    return StageReport(rows={"pairs": whole.pairs, "videos": len(videos)})


EVALUATE_LIBERO_STAGE = Stage(
    "evaluate-libero", 3, EvaluateLiberoStageSettings, ("policy",), evaluate_libero, versions=policy_versions
)
COMPARE_LIBERO_STAGE = Stage("compare-libero", 4, CompareLiberoSettings, ("first", "second"), compare_libero)
