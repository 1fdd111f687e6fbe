"""The stage evaluate-benchmark: a policy plays a benchmark of vla-eval."""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.machine.project import project_source
from armature.components.machine.versions import policy_versions
from armature.components.robots.served.settings import EvaluateBenchmarkStageSettings

if TYPE_CHECKING:
    from armature.components.contracts.robots import RobotPolicy


def evaluate_benchmark(
    settings: EvaluateBenchmarkStageSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Evaluate the policy and write `results.parquet`, `metrics.json`, `eval_info.json` and `report.html`.

    Raises:
        ConfigurationError: policy and benchmark disagree, or the benchmark or one of its tasks does not exist.
        WorkerError: more episodes than allowed could not be played.
        DataError: a message of the benchmark is invalid.
    """
    from armature.components.robots.evaluation.opening import connect_external, load_own
    from armature.components.robots.evaluation.results import collect_results
    from armature.components.robots.evaluation.robot import refuse_disagreement
    from armature.components.robots.evaluation.stage import play_planned, torch_threads, write_evaluation
    from armature.components.robots.policies.source import read_settings
    from armature.components.robots.served.runs import BenchmarkPlayer, planned_episodes, served_robot

    started, plan, source = time.monotonic(), settings.evaluation, inputs["policy"].path
    robot = served_robot(settings.benchmark)
    player = BenchmarkPlayer(settings, context.workspace / "benchmark", context.machine.playing_processes)
    planned = planned_episodes(settings.benchmark.name, plan)
    chosen = read_settings(source)

    def play(policy: RobotPolicy) -> StageReport:
        dimensions = robot.conventions.action_dimensions
        outcomes = play_planned(policy, plan, planned, player, context, dimensions)
        configuration = {"policy": policy.facts(), **settings.model_dump(mode="json")}
        results, seconds = collect_results(planned, outcomes), time.monotonic() - started
        return write_evaluation(results, [], outcomes, [], configuration, seconds, out, context, "Evaluation")

    if chosen is not None and chosen.external is not None:
        with connect_external(chosen.external, source, robot, plan, context.machine.threads) as external:
            return play(external)
    policy = load_own(source, plan)
    refuse_disagreement(
        "the policy",
        {"cameras": tuple(policy.cameras), "action_dimensions": policy.action_dimensions},
        "the benchmark",
        {"cameras": tuple(name for name in policy.cameras if name in robot.cameras.values())}
        | {"action_dimensions": robot.conventions.action_dimensions},
    )
    with torch_threads(context.machine):
        return play(policy)


def benchmark_source(settings: EvaluateBenchmarkStageSettings, inputs: Mapping[str, Artifact]) -> Mapping[str, str]:
    """Return the digest of the benchmark's module, if the recipe names its folder."""
    folder, module = settings.benchmark.folder, settings.benchmark.benchmark.partition(":")[0]
    file = Path(project_source(folder or "")) / f"{module.replace('.', '/')}.py"
    return {"benchmark": sha256(file.read_bytes()).hexdigest()} if folder is not None and file.is_file() else {}


EVALUATE_BENCHMARK_STAGE = Stage(
    "evaluate-benchmark",
    1,
    EvaluateBenchmarkStageSettings,
    ("policy",),
    evaluate_benchmark,
    sources=benchmark_source,
    versions=policy_versions,
)
