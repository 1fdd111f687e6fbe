"""What keeps more GPUs from helping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from armature.components.planning.simulate import SimulatedRun

LEAST = 0.1
"""Of the cost of a rollout, that a wall takes at least."""
RunT = TypeVar("RunT")


def _with(run: SimulatedRun, **values: Any) -> SimulatedRun:
    return replace(run, costs=run.costs.replaced(values, ""))


def _no_flow(run: SimulatedRun) -> SimulatedRun:
    return _with(run, flow={"request_seconds": 0.0, "image_seconds": 0.0, "rollout_seconds": 0.0})


def _more_episodes(run: SimulatedRun) -> SimulatedRun:
    """As many at once as before, where that is fewer than a step has."""
    plan = run.rollouts.model_copy(update={"groups_per_step": 2 * run.rollouts.groups_per_step})
    limited = run.max_concurrent < run.rollouts.groups_per_step * run.rollouts.group_size
    return replace(run, rollouts=plan, max_concurrent=run.max_concurrent * (1 if limited else 2))


WALLS: Mapping[str, Callable[[SimulatedRun], SimulatedRun]] = {
    "event loop of the flow process": _no_flow,
    "sync of weights": lambda run: _with(run, publish_seconds=0.0, sync_seconds=0.0),
    "weights gathered between ranks": lambda run: _with(run, trainer={"gather_seconds": 0.0, "exposed_seconds": 0.0}),
    "longest episodes": lambda run: replace(run, workload=run.workload.evened()),
    "too few groups in a step": _more_episodes,
    "too few environments at once": lambda run: replace(run, max_concurrent=2 * run.max_concurrent),
}
"""No seconds of the flow's event loop, of a sync, of gathering weights; every episode the mean of all; twice the groups
in a step; twice the episodes at once."""


class CostOfSimulation(Protocol):
    """Of a simulation: the seconds of a GPU that a rollout costs."""

    @property
    def gpu_seconds(self) -> float: ...


class SimulatedPlan(Protocol):
    def simulate(self) -> CostOfSimulation: ...


def first_wall(
    run: RunT, found: CostOfSimulation, walls: Mapping[str, Callable[[RunT], SimulatedPlan]]
) -> tuple[str, float]:
    """That without which a rollout costs least, and the share of its cost; "" where none takes a tenth.

    Each of `walls` is taken away in turn and the run simulated again.
    """
    gains = {name: 1 - change(run).simulate().gpu_seconds / found.gpu_seconds for name, change in walls.items()}
    name = max(gains, key=lambda each: gains[each])
    return (name if gains[name] >= LEAST else ""), gains[name]
