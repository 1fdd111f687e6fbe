"""Costs from the records of finished runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import numpy.typing as npt

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.inference.merge import WINDOW
from armature.components.planning.costs import Costs, FlowCosts, ServerCosts, TrainerCosts
from armature.components.planning.estimate import Assumptions
from armature.components.planning.lines import apart, line
from armature.components.planning.records import RunRecords, episode_of, workload_of
from armature.components.planning.simulate import SimulatedRun
from armature.components.planning.trainer import PlannedRollout, samples_of, training_seconds
from armature.components.rollouts.rounds import choose_groups, groups_that_differ
from armature.components.vlm.plan import updates

Seconds = npt.NDArray[np.float64]
WAIT = "timing/wait_for_rollouts"


@dataclass(frozen=True)
class MeasuredRuns:
    """`runs`: each as it was made, by the costs of all. `bounds`: by the costs if nothing, and if all of what could not
    be told apart is fixed; empty where all was. `slowdown`: mean of `RunRecords.slowdown`; None: not recorded.
    """

    runs: Sequence[SimulatedRun]
    bounds: Sequence[Costs]
    unknown: Sequence[str]
    slowdown: float | None

    @property
    def costs(self) -> Costs:
        return self.runs[0].costs


def measured_runs(runs: Sequence[RunRecords], machine: Machine) -> MeasuredRuns:
    """Simulates `runs` by the costs that their records say.

    The seconds of training, of making a batch and of rollouts are each fitted by a part that is fixed and one that
    grows with the step. Steps of one size do not say which is how large: half of what can be fixed is taken to be.
    The servers' seconds are fitted so that steps wait as long for their rollouts as those of the runs, and that the
    fastest answer takes as long. What the event loop of the flow takes is not in the records. Runs under different
    load are first brought to the mean of their slowdowns.

    Raises:
        ConfigurationError: rollouts were played while the trainer worked, so what they took is not in the records; or
            the runs have different models.
    """
    for records in runs:
        _refuse(records, runs[0])
    slowdowns = [records.slowdown for records in runs]
    known = [slowdown for slowdown in slowdowns if slowdown is not None]
    even = len(known) == len(runs)
    scales = [fmean(known) / slowdown for slowdown in known] if even else [1.0] * len(runs)
    fit = _Fit(runs, machine, scales)
    costs, *bounds = [fit.costs(share) for share in ((0.5, 0.0, 1.0) if fit.unknown else (0.5,))]
    made = [replace(run, costs=costs) for run in fit.runs]
    return MeasuredRuns(made, bounds, fit.unknown, fmean(known) if even else None)


def _refuse(records: RunRecords, first: RunRecords) -> None:
    settings = records.settings
    if settings.rollouts.max_staleness:
        raise ConfigurationError(
            "a run whose rollouts are played while it trains does not say how long they took",
            where=f"rollouts.max_staleness = {settings.rollouts.max_staleness} in {records.path}",
            remedy="give a run with max_staleness = 0: what it measured holds for the others",
        )
    if settings.model != first.settings.model:
        raise ConfigurationError(
            "runs of different models do not have the same costs",
            where=f"{first.path}, {records.path}",
            remedy="give runs of one model",
        )


class _Fit:
    """Fits what all `runs` say, whose seconds are multiplied by `scales`.

    `unknown` names the parts of a step whose fixed share they do not tell, as all of their steps are of one size.
    """

    def __init__(self, runs: Sequence[RunRecords], machine: Machine, scales: Sequence[float]) -> None:
        self._sources = "measured: " + ", ".join(str(one.path) for one in runs)
        sharing = machine.trainer_context_parallel
        scaled = list(zip(runs, scales, strict=True))
        self._training = [
            point for one, scale in scaled for point in _training(one, one.ranks(machine), sharing, scale)
        ]
        self._batches = [
            (step["rollouts/planned"], scale * step["timing/batch"]) for one, scale in scaled for step in one.steps
        ]
        self._waits = [scale * one.mean(WAIT) for one, scale in scaled]
        self._sync = fmean(scale * one.mean("timing/sync") for one, scale in scaled)
        self._tokens = [
            one.mean("rollouts/planned") * one.mean("turns") * one.mean("tokens/completion") for one in runs
        ]
        self.runs = [_simulated(one, machine) for one in runs]
        batches, updated = ([size for size, _ in points] for points in (self._batches, self._training))
        parts = {"rollouts": self._tokens, "batch": batches, "train": updated}
        played = [each for one in runs for outputs in one.outputs for each in outputs.trajectories]
        self._fastest = min(
            (turn for each in played for turn in each.turns),
            key=lambda turn: turn.generate_seconds / turn.completion_token_ids.size,
        )
        self._known: dict[float, Seconds] = {}
        self.unknown = [name for name, sizes in parts.items() if not apart(sizes)]

    def costs(self, share: float) -> Costs:
        """With `share` of what can be fixed, in the parts that are `unknown`."""
        said, fields = Assumptions(), Assumptions.model_fields
        update, token = line(self._training, share)
        batch, rollout = line(self._batches, share)
        costs = Costs(
            servers=ServerCosts(pass_seconds=0.0, token_seconds=0.0),
            trainer=TrainerCosts(token_seconds=token, update_seconds=update),
            flow=FlowCosts(
                request_seconds=said.request_seconds,
                image_seconds=said.image_seconds,
                rollout_seconds=rollout,
                batch_seconds=batch,
            ),
            sync_seconds=self._sync,
        )
        costs = self._with_servers(costs, share)
        fitted = [f"servers.{name}" for name in ("pass_seconds", "token_seconds")]
        fitted += [f"trainer.{name}" for name in ("token_seconds", "update_seconds")]
        fitted += [f"flow.{name}" for name in ("rollout_seconds", "batch_seconds", "step_seconds")]
        sources = dict.fromkeys(fitted, self._sources + ", fitted") | {"sync_seconds": self._sources + ", mean"}
        sources |= {f"flow.{name}": str(fields[name].description) for name in ("request_seconds", "image_seconds")}
        return costs.model_copy(update={"sources": sources})

    def _with_servers(self, costs: Costs, share: float) -> Costs:
        measured, tokens = np.array(self._waits), np.array(self._tokens)
        mean, near = float(measured.mean()), 0.01 * float(measured.mean())
        first, fixed, token = mean / float(tokens.mean()), 0.0, 0.0
        if "rollouts" in self.unknown:
            fixed = share * max(0.0, mean - fmean(self._simulated_waits(costs, 0.0)))
        else:  # least squares: what is left does not grow with the tokens
            larger = (tokens - tokens.mean()) / float(np.abs(tokens - tokens.mean()).sum())
            token = _rising(
                lambda each: float(larger @ (self._simulated_waits(costs, each) - measured)), 0, first, near
            )
            fixed = max(0.0, mean - fmean(self._simulated_waits(costs, token)))
        if "rollouts" in self.unknown or not fixed:
            token = _rising(lambda each: fmean(self._simulated_waits(costs, each)), mean - fixed, first, near)
        flow = costs.flow.model_copy(update={"step_seconds": fixed})
        return costs.model_copy(update={"flow": flow, "servers": self._servers(token)})

    def _servers(self, token_seconds: float) -> ServerCosts:
        """The fastest answer takes as long as it did."""
        fastest, tokens = self._fastest, self._fastest.completion_token_ids.size
        own = fastest.generate_seconds - WINDOW - fastest.prompt_token_ids.size * token_seconds
        return ServerCosts(pass_seconds=max(0.0, own / tokens - token_seconds), token_seconds=token_seconds)

    def _simulated_waits(self, costs: Costs, token_seconds: float) -> Seconds:
        """Of each run; they do not depend on what else costs what."""
        if token_seconds not in self._known:
            found = costs.model_copy(update={"servers": self._servers(token_seconds)})
            waits = [replace(run, costs=found).simulate().timings[WAIT] for run in self.runs]
            self._known[token_seconds] = np.array(waits)
        return self._known[token_seconds]


def _simulated(records: RunRecords, machine: Machine) -> SimulatedRun:
    settings = records.settings
    return SimulatedRun(
        rollouts=settings.rollouts,
        batches=settings.batches,
        trainer=settings.trainer,
        costs=Costs.nothing(),
        workload=workload_of(records),
        servers=records.servers(machine),
        gpus_per_server=max((len(each) for each in machine.server_gpus), default=1),
        ranks=records.ranks(machine),
        sharing=machine.trainer_context_parallel,
        max_concurrent=machine.max_concurrent,
        train_tasks=settings.environment.train_tasks or 4096,
        steps=len(records.steps),
    )


def _training(records: RunRecords, ranks: int, sharing: int, scale: float) -> list[tuple[float, float]]:
    """Of each step: the tokens that an update waits for, and its seconds."""
    settings, one_each = records.settings, TrainerCosts(token_seconds=1.0)
    points = []
    for step, outputs in zip(records.steps, records.outputs, strict=True):
        samples = samples_of(_trained(outputs, records), False)
        count = len(list(updates(len(samples), settings.trainer.samples_per_update)))
        tokens = training_seconds(samples, settings.trainer, one_each, ranks, sharing)
        if count:
            points.append((tokens / count, scale * step["timing/train"] / count))
    return points


def _trained(outputs: GenerateOutputs, records: RunRecords) -> list[PlannedRollout]:
    differing, skip = set(groups_that_differ(outputs)), records.settings.batches.skip_zero_advantage
    chosen = choose_groups(outputs, records.settings.rollouts).outputs.trajectories
    return [
        PlannedRollout(one.group_id, episode_of(one, False)) for one in chosen if one.group_id in differing or not skip
    ]


def _rising(function: Callable[[float], float], target: float, first: float, near: float) -> float:
    """A number from 0 on where a rising function is `near` to `target`; 0 where it is larger from the beginning.

    Args:
        first: greater than 0, to begin with.
    """
    low, high, below, above = 0.0, first, function(0.0), function(first)
    if below >= target:
        return 0.0
    while above < target:
        low, high, below, above = high, 2 * high, above, function(2 * high)
    while min(target - below, above - target) > near:
        middle = low + (high - low) * min(max((target - below) / (above - below), 0.1), 0.9)
        value = function(middle)
        low, high, below, above = (middle, high, value, above) if value < target else (low, middle, below, value)
    return low if target - below <= near else high
