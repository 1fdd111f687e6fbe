"""The stage evaluate-benchmark: a policy plays a benchmark of vla-eval."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from armature.components.contracts.digests import file_digest, listing_digest
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.machine.project import modules_beside
from armature.components.machine.versions import policy_versions
from armature.components.robots.served.settings import EvaluateBenchmarkStageSettings


def evaluate_benchmark(
    settings: EvaluateBenchmarkStageSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Evaluate the policy and write `results.parquet`, `metrics.json`, `eval_info.json`, `videos/` and
    `report.html`.

    Raises:
        ConfigurationError: policy and benchmark disagree, or the benchmark or one of its tasks does not exist.
        WorkerError: more episodes than allowed could not be played.
        DataError: a message of the benchmark is invalid.
    """
    from armature.components.robots.evaluation.opening import open_policy
    from armature.components.robots.evaluation.results import collect_results
    from armature.components.robots.evaluation.stage import play_planned, torch_threads, write_evaluation
    from armature.components.robots.served.runs import BenchmarkPlayer, planned_episodes, served_robot

    started, plan, robot = time.monotonic(), settings.evaluation, served_robot(settings.benchmark)
    player = BenchmarkPlayer(settings, context.workspace / "benchmark", context.machine.playing_processes)
    planned = planned_episodes(settings.benchmark.name, plan)
    with open_policy(inputs["policy"].path, robot, plan, context) as policy, torch_threads(context.machine):
        outcomes = play_planned(policy, plan, planned, player, context, robot.conventions.action_dimensions)
        results, seconds = collect_results(planned, outcomes), time.monotonic() - started
        stills = player.films.collect(planned, outcomes, results, out)
        return write_evaluation(
            policy, settings, results, outcomes, seconds, out, context, stills=stills, title="Evaluation"
        )


def benchmark_source(settings: EvaluateBenchmarkStageSettings, inputs: Mapping[str, Artifact]) -> Mapping[str, str]:
    """Return the digest of the benchmark's module and of the modules beside it that it imports, if the recipe names
    their folder."""
    from armature.components.robots.served.runs import benchmark_folder

    folder = benchmark_folder(settings.benchmark)
    if folder is None:
        return {}
    modules = modules_beside(folder, settings.benchmark.benchmark.partition(":")[0].partition(".")[0])
    files = {str(file.relative_to(folder)): file_digest(file) for _, inside in modules.values() for file in inside}
    return {"benchmark": listing_digest(files)}


EVALUATE_BENCHMARK_STAGE = Stage(
    "evaluate-benchmark",
    1,
    EvaluateBenchmarkStageSettings,
    ("policy",),
    evaluate_benchmark,
    sources=benchmark_source,
    versions=policy_versions,
)
