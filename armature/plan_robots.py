"""`armature plan` of a recipe of `train-vla-rl`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from armature.components.configuration import Recipe, explain
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.evaluation.libero.settings import TrainLiberoEvaluationSettings
from armature.components.planning.gpus import Gpu
from armature.components.planning.robots.estimate import RobotAssumptions, estimated_robot_costs
from armature.components.planning.robots.geometry import PolicyGeometry
from armature.components.planning.robots.records import RobotRunRecords, measured_robot_runs
from armature.components.planning.robots.simulate import SimulatedRobotRun
from armature.components.planning.robots.walls import ROBOT_WALLS
from armature.components.planning.robots.workload import RobotWorkload, RobotWorkloadSettings, drawn
from armature.components.planning.walls import first_wall
from armature.components.policies.settings import RobotPolicySettings
from armature.components.vla_rl.settings import SuccessReward, TrainVLARLSettings
from armature.plan_table import beside, table

ROBOT_SIZES = (1, 8)
ROBOT_HEAD = (
    *("GPUs", "simulators", "step", "episodes/min", "GPU s each", "simulators busy", "policy busy", "trainer busy"),
    "first wall",
)
ROBOT_SHOWN = ("wait_for_rollouts", "batch", "train", "sync", "step")


class RobotPlanner:
    """Plans a recipe's run: simulators are those of the recipe, the policy answers on the trainer's first GPU.

    Args:
        given: values that stand in the places of computed costs, and where they are from.
    """

    def __init__(
        self,
        recipe: Recipe,
        sizes: PolicyGeometry,
        gpu: Gpu,
        workload: RobotWorkload,
        given: tuple[Mapping[str, Any], str] = ({}, ""),
    ) -> None:
        self.settings, self.machine, self.policy, self.evaluation = robot_sections(recipe)
        self.sizes, self.gpu, self.workload, self._given = sizes, gpu, workload, given

    def run(self, gpus: int) -> SimulatedRobotRun:
        settings = self.settings
        costs = estimated_robot_costs(
            self.sizes, self.gpu, RobotAssumptions(), settings.rollouts, settings.trainer, settings.simulator, gpus
        )
        return SimulatedRobotRun(
            settings=settings,
            costs=costs.replaced(*self._given),
            workload=self.workload,
            processes=min(self.machine.playing_processes, settings.rollouts.batch),
            ranks=gpus,
            chunk=self.policy.n_action_steps,
            steps=1,
        )


def robot_sections(
    recipe: Recipe,
) -> tuple[TrainVLARLSettings, Machine, RobotPolicySettings, TrainLiberoEvaluationSettings]:
    settings, sections = recipe.settings_for(TrainVLARLSettings), recipe.sections
    machine, policy, evaluation = sections["machine"], sections["policy"], sections["evaluation"]
    assert isinstance(settings, TrainVLARLSettings) and isinstance(machine, Machine)
    assert isinstance(policy, RobotPolicySettings) and isinstance(evaluation, TrainLiberoEvaluationSettings)
    return settings, machine, policy, evaluation


def robot_row(planner: RobotPlanner, gpus: int) -> tuple[list[str], SimulatedRobotRun]:
    """The cells below `ROBOT_HEAD`, and the run that they are of."""
    run = planner.run(gpus)
    found = run.simulate()
    wall, gain = first_wall(run, found, ROBOT_WALLS)
    row = [
        f"{gpus:,}",
        f"{run.settings.rollouts.batch} in {run.processes}",
        f"{found.step_seconds:,.1f} s",
        f"{60 * found.episodes_per_step / found.step_seconds:,.1f}",
        f"{found.gpu_seconds:,.2f}",
        f"{found.simulator_share:.0%}",
        f"{found.policy_share:.0%}",
        f"{found.trainer_share:.0%}",
        f"{wall} ({gain:.0%} of the cost)" if wall else "none: simulators, policy and trainer work",
    ]
    return row, run


def plan_robots(recipe: Recipe, planner: RobotPlanner, gpus: Sequence[int], price: float | None) -> Iterator[str]:
    """The lines of the plan on so many GPUs."""
    plan = planner.settings.rollouts
    yield f"{recipe.name}: {planner.sizes.parameters / 1e9:.3g} billion parameters on {planner.gpu.name}, simulated"
    mode = "one step ahead" if plan.max_staleness else "in turn"
    yield f"a step: {plan.groups_per_step} groups of {plan.group_size}, {mode}"
    yield f"episodes: {planner.workload.source}"
    yield ""
    rows = [[*ROBOT_HEAD[:5], *(["$ per 1,000"] if price is not None else []), *ROBOT_HEAD[5:]]]
    for count in gpus or ROBOT_SIZES:
        row, run = robot_row(planner, count)
        cost = [f"{float(row[4].replace(',', '')) / 3600 * price * 1000:,.2f}"] if price is not None else []
        rows.append([*row[:5], *cost, *row[5:]])
    yield from table(rows)
    yield ""
    yield from _examined(run, planner.evaluation)
    yield ""
    yield "what this rests on, for the last row:"
    yield from (f"  {line}" for line in run.costs.lines())
    yield ""
    yield (
        "not simulated: memory, failures, the start of simulators and trainer, and cores that are fewer than the "
        "simulators' processes"
    )


def plan_robots_as_measured(
    recipe: Recipe, runs: Sequence[RobotRunRecords], given: tuple[Mapping[str, Any], str]
) -> Iterator[str]:
    """The recipe on the machine of `runs`, by their costs; beside the steps of the first, if it is that recipe."""
    settings, machine, _, evaluation = robot_sections(recipe)
    found, first = measured_robot_runs(runs), runs[0]
    processes = min(machine.playing_processes, settings.rollouts.batch)
    run = replace(found.runs[0], settings=settings, costs=found.costs.replaced(*given), processes=processes)
    predicted = run.simulate()
    same = (settings.rollouts, settings.trainer.advantage) == (
        first.settings.rollouts,
        first.settings.trainer.advantage,
    )
    yield f"{recipe.name} on the machine of {', '.join(str(one.path) for one in runs)}, simulated by its costs"
    yield ""
    rows = [["seconds", "predicted", *(["measured", "difference"] if same else [])]]
    for part in ROBOT_SHOWN:
        key = f"timing/{part}"
        seconds = predicted.timings[key]
        rows.append([part, f"{seconds:.2f}", *(beside(seconds, first.mean(key)) if same else [])])
    yield from table(rows)
    yield ""
    yield (
        f"busy: simulators {predicted.simulator_share:.0%}, policy {predicted.policy_share:.0%}, trainer "
        f"{predicted.trainer_share:.0%} of the time; {predicted.trained_per_step:.0f} of "
        f"{predicted.answers_per_step:.0f} answers of a step are trained on"
    )
    yield from _examined(run, evaluation)
    if found.unknown:
        yield (
            f"not known: how much of {', '.join(found.unknown)} is fixed, whatever the size of a step, as all steps of "
            "the run were of about one size; half of it is taken to be"
        )
    yield "these seconds hold for the load that the machine had meanwhile" + (
        f": {found.slowdown:.1f} s passed for each second that the run's threads computed" if found.slowdown else ""
    )
    yield ""
    yield "what this rests on:"
    yield f"  {'episodes':<32} {'':>10}  {run.workload.source}"
    yield from (f"  {line}" for line in run.costs.lines())


def _examined(run: SimulatedRobotRun, evaluation: TrainLiberoEvaluationSettings) -> Iterator[str]:
    seconds = run.evaluation_seconds(evaluation)
    every = f", and {evaluation.panel_episodes} of each task every {evaluation.every} steps" * bool(evaluation.every)
    yield f"the evaluations before and after take {seconds:,.0f} s each{every}"


def described_robot_workload(recipe: Recipe, values: Mapping[str, Any], file: Path | None) -> RobotWorkload:
    """Episodes as the file says; the rest is assumed.

    Raises:
        ConfigurationError: the file says something else.
    """
    settings = robot_sections(recipe)[0].rollouts
    try:
        made = RobotWorkloadSettings.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigurationError(explain(error, "workload", RobotWorkloadSettings), where=str(file)) from error
    parts = ", ".join(f"{key} = {value:g}" for key, value in made.model_dump().items())
    given = f"given in {file}: {', '.join(values)}; the rest " if values else ""
    partly = not isinstance(settings.reward, SuccessReward)
    return drawn(made, settings.max_steps, settings.group_size, partly, settings.seed, f"{given}assumed: {parts}")
