"""What keeps a robot policy from learning faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from armature.components.planning.robots.simulate import SimulatedRobotRun


def _with(run: SimulatedRobotRun, **values: Any) -> SimulatedRobotRun:
    return replace(run, costs=run.costs.replaced(values, ""))


def _of_rollouts(run: SimulatedRobotRun, **values: int) -> SimulatedRobotRun:
    plan = run.settings.rollouts.model_copy(update=values)
    return replace(run, settings=run.settings.model_copy(update={"rollouts": plan}))


def _more_simulators(run: SimulatedRobotRun) -> SimulatedRobotRun:
    return replace(_of_rollouts(run, batch=2 * run.settings.rollouts.batch), processes=2 * run.processes)


ROBOT_WALLS: Mapping[str, Callable[[SimulatedRobotRun], SimulatedRobotRun]] = {
    "too few simulators": _more_simulators,
    "simulators built for other tasks": lambda run: _with(
        run, simulators={"build_seconds": run.costs.simulators.reset_seconds}
    ),
    "the one policy": lambda run: _with(run, policy={"pass_seconds": 0.0}),
    "sync of weights": lambda run: _with(run, sync_seconds=0.0),
    "weights gathered between ranks": lambda run: _with(run, trainer={"gather_seconds": 0.0}),
    "longest episodes": lambda run: replace(run, workload=run.workload.evened()),
    "too few groups in a step": lambda run: _of_rollouts(
        run, groups_per_step=2 * run.settings.rollouts.groups_per_step
    ),
}
