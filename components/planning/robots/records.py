"""What finished runs of `train-vla-rl` took, and the costs that their records say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import ConfigurationError
from armature.components.planning.lines import apart, line
from armature.components.planning.records import finished_run, slowdown_of
from armature.components.planning.robots.costs import (
    PolicyCosts,
    RobotCosts,
    RobotFlowCosts,
    RobotTrainerCosts,
    SimulatorCosts,
)
from armature.components.planning.robots.simulate import SimulatedRobotRun, training_seconds
from armature.components.planning.robots.workload import RobotEpisode, RobotWorkload
from armature.components.vla_rl.settings import TrainVLARLSettings
from armature.components.vla_rl.table import Answer, read_rollouts
from armature.components.vla_rl.updates import update_rows

WAIT = "timing/wait_for_rollouts"
MEANS = (
    *("simulators.build_seconds", "simulators.reset_seconds", "simulators.action_seconds", "policy.pass_seconds"),
    *("policy.rows", "flow.answer_seconds", "sync_seconds"),
)
FITTED = ("trainer.answer_seconds", "trainer.update_seconds", "flow.batch_answer_seconds", "flow.batch_seconds")


@dataclass(frozen=True)
class RobotRunRecords:
    """A run by its settings, and of the steps that count the numbers and the answers.

    `policy` is the digest of the policy that it began with.
    """

    path: Path
    settings: TrainVLARLSettings
    policy: str
    steps: Sequence[Mapping[str, float]]
    answers: Sequence[Sequence[Answer]]

    def mean(self, name: str) -> float:
        return fmean(step.get(name, 0.0) for step in self.steps)

    @property
    def slowdown(self) -> float | None:
        """See `slowdown_of`."""
        return slowdown_of(self.steps)

    @property
    def chunk(self) -> int:
        """Actions that follow from an answer."""
        return max(answer.executed for answers in self.answers for answer in answers)


def read_robot_run(path: Path, store: ArtifactStore) -> RobotRunRecords:
    """The run whose artifact of train-vla-rl is `path`.

    Raises:
        ConfigurationError, DataError: as `finished_run`; or it does not say what simulators took.
    """
    found = finished_run(path, store, "train-vla-rl")
    if any("simulator/actions" not in step for step in found.steps):
        raise ConfigurationError(
            "the run does not say what its simulators and its policy took: it was resumed within these steps",
            where=str(path),
            remedy="give another run, or --gpus, which computes the costs",
        )
    settings = TrainVLARLSettings.model_validate(found.settings)
    answers = [read_rollouts(folder) for folder in found.rollouts]
    return RobotRunRecords(path, settings, found.inputs["policy"], found.steps, answers)


def robot_workload_of(records: RobotRunRecords) -> RobotWorkload:
    """The episodes of the run, step by step and group by group, as they were."""
    steps = [_groups(answers) for answers in records.answers]
    count = sum(len(group) for step in steps for group in step)
    made, dropped = records.mean("updates"), records.mean("updates_dropped")
    share = made / (made + dropped) if made else 1.0
    return RobotWorkload(steps, f"measured: {count} episodes of {records.path}", share)


def _groups(answers: Sequence[Answer]) -> list[list[RobotEpisode]]:
    groups: dict[str, dict[str, list[Answer]]] = {}
    for answer in answers:
        groups.setdefault(answer.group_id, {}).setdefault(answer.episode_id, []).append(answer)
    return [
        [
            RobotEpisode(
                sum(one.executed for one in episode), not episode[-1].truncated, sum(e.reward for e in episode)
            )
            for episode in group.values()
        ]
        for group in groups.values()
    ]


@dataclass(frozen=True)
class MeasuredRobotRuns:
    """`runs`: each as it was made, by the costs of all. `unknown`: whose fixed part is not known. `slowdown`: mean of
    `RobotRunRecords.slowdown`; None: not recorded."""

    runs: Sequence[SimulatedRobotRun]
    unknown: Sequence[str]
    slowdown: float | None

    @property
    def costs(self) -> RobotCosts:
        return self.runs[0].costs


def measured_robot_runs(runs: Sequence[RobotRunRecords]) -> MeasuredRobotRuns:
    """Simulates `runs` by the costs that their records say.

    Simulators, policy and the keeping of answers were timed; so were batch, training and sync, the first two with a
    part that is fixed. What steps waited for their rollouts beyond what is simulated of these is a fixed cost of
    a step. Runs under different load are first brought to the mean of their slowdowns.

    Raises:
        ConfigurationError: the runs have different policies, or played while they trained.
    """
    for records in runs:
        _refuse(records, runs[0])
    known = [records.slowdown for records in runs if records.slowdown is not None]
    even = len(known) == len(runs)
    scales = [fmean(known) / slowdown for slowdown in known] if even else [1.0] * len(runs)
    costs, unknown = _costs(list(zip(runs, scales, strict=True)))
    made = [replace(_simulated(records), costs=costs) for records in runs]
    waits = [scale * one.mean(WAIT) for one, scale in zip(runs, scales, strict=True)]
    left = fmean(wait - run.simulate().timings[WAIT] for wait, run in zip(waits, made, strict=True))
    source = {"flow.step_seconds": _source(runs, "what rollouts took beyond their parts")}
    flow = costs.flow.model_copy(update={"step_seconds": max(0.0, left)})
    costs = costs.model_copy(update={"flow": flow, "sources": {**costs.sources, **source}})
    return MeasuredRobotRuns([replace(run, costs=costs) for run in made], unknown, fmean(known) if even else None)


def _refuse(records: RobotRunRecords, first: RobotRunRecords) -> None:
    if records.settings.rollouts.max_staleness:
        raise ConfigurationError(
            "a run whose rollouts are played while it trains does not say how long they took alone",
            where=f"rollouts.max_staleness = 1 in {records.path}",
            remedy="give a run with max_staleness = 0: what it measured holds for the others",
        )
    if records.policy != first.policy:
        raise ConfigurationError(
            "runs of different policies do not have the same costs",
            where=f"{first.path}, {records.path}",
            remedy="give runs that began with one policy",
        )


OF_PLAYERS = ("timing/prepare", "timing/keep_answers")
"""What the threads of players compute, for each answer."""


def _costs(runs: Sequence[tuple[RobotRunRecords, float]]) -> tuple[RobotCosts, list[str]]:
    """Sums of seconds over sums of counts; lines through the steps for what has a fixed part."""

    def each(seconds: str, count: str) -> float:
        counted = sum(step.get(count, 0.0) for one, _ in runs for step in one.steps)
        spent = sum(scale * step.get(seconds, 0.0) for one, scale in runs for step in one.steps)
        return spent / counted if counted else 0.0

    reset = each("timing/simulator_reset", "simulator/resets")
    built = each("timing/simulator_build", "simulator/builds")
    updates = [point for one, scale in runs for point in _updates(one, scale)]
    sizes = [(float(len(rows)), scale * step["timing/batch"]) for one, scale in runs for rows, step in _steps(one)]
    update, answer = line(updates, 0.5) if updates else (0.0, 0.0)
    batch, batch_answer = line(sizes, 0.5)
    first = runs[0][0]
    costs = RobotCosts(
        simulators=SimulatorCosts(
            build_seconds=built or reset,
            reset_seconds=reset or built,
            action_seconds=each("timing/simulator_step", "simulator/actions"),
        ),
        policy=PolicyCosts(
            pass_seconds=each("timing/policy", "policy/passes"), rows=round(first.mean("policy/rows_per_pass"))
        ),
        trainer=RobotTrainerCosts(answer_seconds=answer, update_seconds=update),
        flow=RobotFlowCosts(
            answer_seconds=sum(scale * step[name] for one, scale in runs for step in one.steps for name in OF_PLAYERS)
            / sum(size for size, _ in sizes),
            batch_answer_seconds=batch_answer,
            batch_seconds=batch,
        ),
        sync_seconds=fmean(scale * one.mean("timing/sync") for one, scale in runs),
    )
    records = [one for one, _ in runs]
    sources = dict.fromkeys(MEANS, _source(records, "mean")) | dict.fromkeys(FITTED, _source(records, "fitted"))
    sources |= {"trainer.gather_seconds": "included in trainer.answer_seconds"}
    if not built:
        sources["simulators.build_seconds"] = "not measured: no simulator was built in these steps; that of a reset"
    if not reset:
        sources["simulators.reset_seconds"] = "not measured: every reset built a simulator; that of a build"
    parts = {"batch": sizes, "train": updates or [(1.0, 0.0)]}
    unknown = [name for name, points in parts.items() if not apart([size for size, _ in points])]
    return costs.model_copy(update={"sources": sources}), unknown


def _source(runs: Sequence[RobotRunRecords], how: str) -> str:
    return f"measured: {', '.join(str(one.path) for one in runs)}, {how}"


def _steps(records: RobotRunRecords) -> list[tuple[Sequence[Answer], Mapping[str, float]]]:
    return list(zip(records.answers, records.steps, strict=True))


def _updates(records: RobotRunRecords, scale: float) -> list[tuple[float, float]]:
    """Of each step with updates: the answers that an update waits for, and its seconds."""
    settings, ranks = records.settings.trainer, round(records.mean("machine/ranks"))
    one_each = RobotCosts.nothing().replaced({"trainer": {"answer_seconds": 1.0}}, "")
    points = []
    for step in records.steps:
        if step["updates"]:
            trained = round(step["answers/trained"])
            planned = len(update_rows(trained, settings, 0))
            size = training_seconds(trained, settings, one_each, ranks) / planned
            points.append((size, scale * step["timing/train"] / step["updates"]))
    return points


def _simulated(records: RobotRunRecords) -> SimulatedRobotRun:
    return SimulatedRobotRun(
        settings=records.settings,
        costs=RobotCosts.nothing(),
        workload=robot_workload_of(records),
        processes=round(records.mean("machine/simulators")),
        ranks=round(records.mean("machine/ranks")),
        chunk=records.chunk,
        steps=len(records.steps),
    )
