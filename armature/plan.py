"""`armature plan`: what a recipe would take on many GPUs, simulated before they are rented."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from armature.components.configuration import Recipe, explain, read_toml
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.environments import ENVIRONMENTS
from armature.components.planning.costs import Costs, CostTables
from armature.components.planning.fitting import MeasuredRuns, measured_runs
from armature.components.planning.geometry import geometry, read_config
from armature.components.planning.gpus import GIB, GPUS
from armature.components.planning.layout import Planner
from armature.components.planning.records import RunRecords, read_run, workload_of
from armature.components.planning.robots.costs import RobotCosts
from armature.components.planning.robots.geometry import policy_geometry, read_policy_config
from armature.components.planning.robots.records import read_robot_run, robot_workload_of
from armature.components.planning.walls import WALLS, first_wall
from armature.components.planning.workload import Workload, WorkloadSettings, drawn
from armature.components.project import project
from armature.components.registry import suggestion
from armature.components.rl.settings import TrainVLMSettings
from armature.components.stages import open_store
from armature.plan_robots import (
    RobotPlanner,
    described_robot_workload,
    plan_robots,
    plan_robots_as_measured,
    robot_sections,
)
from armature.plan_table import beside, table

SIZES = (8, 64, 512, 4096)
HEAD = (
    *("GPUs", "servers", "ranks", "step", "rollouts/s", "GPU s each", "servers busy", "sequences", "trainer busy"),
    *("server GiB", "rank GiB", "first wall"),
)
SHOWN = ("wait_for_rollouts", "batch", "train", "sync", "step")


def plan_recipe(
    recipe: Recipe, gpus: Sequence[int], gpu: str, records: Sequence[Path], given: Path | None, price: float | None
) -> Iterator[str]:
    """The lines of the plan.

    Args:
        gpus: how many there are; none: `SIZES`, or the machine of `records` as it was.
        gpu: key of `GPUS`.
        records: artifacts of finished trainings of the recipe's flow; the episodes are those of the first.
        given: file of costs and of the table `workload`.
        price: of a GPU for an hour.

    Raises:
        ConfigurationError: a recipe without rollouts, an unknown GPU or cost, or a model that does not fit.
        DataError: the model's configuration or the run cannot be read.
    """
    if recipe.flow == "train-vla-rl":
        yield from _plan_robots(recipe, gpus, gpu, records, given, price)
        return
    if recipe.flow != "train-vlm":
        raise ConfigurationError(
            f"{recipe.flow} has no rollouts, which are what is planned",
            where=recipe.name,
            remedy="give a recipe of train-vlm or train-vla-rl",
        )
    settings, machine = recipe.settings_for(TrainVLMSettings), recipe.sections["machine"]
    assert isinstance(settings, TrainVLMSettings) and isinstance(machine, Machine)
    costs, described = _given(given, Costs.nothing())
    with project(recipe.folder):
        store = open_store(machine)
    runs = [read_run(path, store) for path in records]
    if runs and not gpus:
        yield from _as_measured(recipe.name, settings, machine, runs, (costs, f"given: {given}"))
        return
    _refuse_gpu(gpu)
    with project(recipe.folder):
        sizes = geometry(read_config(settings.model), settings.model, settings.trainer, settings.inference.dtype)
    workload = workload_of(runs[0]) if runs else described_workload(settings, described, given)
    planner = Planner(settings, machine, sizes, GPUS[gpu], workload, (costs, f"given: {given}"))
    plan = settings.rollouts
    mode = "in turn"
    if plan.max_staleness:
        mode = f"{plan.max_staleness} ahead" + ", updates in flight" * plan.in_flight_updates
    yield f"{recipe.name}: {sizes.parameters / 1e9:.2f} billion parameters on {gpu}, simulated"
    yield f"a step: {plan.groups_per_step} groups of {plan.group_size}, {mode}"
    yield f"episodes: {workload.source}"
    yield ""
    rows = [[*HEAD[:6], *(["$ per 1,000"] if price is not None else []), *HEAD[6:]]]
    last: Costs | None = None
    for count in gpus or SIZES:
        try:
            row, last = plan_row(planner, count)
        except ConfigurationError as error:
            if len(gpus) == 1:
                raise
            rows.append([f"{count:,}", *[""] * (len(rows[0]) - 2), error.what])
            continue
        cost = [f"{float(row[5].replace(',', '')) / 3600 * price * 1000:,.2f}"] if price is not None else []
        rows.append([*row[:6], *cost, *row[6:]])
    yield from table(rows)
    if last is not None:
        yield ""
        yield "what this rests on, for the last row:"
        yield from (f"  {line}" for line in last.lines())
    yield ""
    yield "not simulated: evaluations, the start of servers and trainer, the time to make micro-batches of images"


def _plan_robots(
    recipe: Recipe, gpus: Sequence[int], gpu: str, records: Sequence[Path], given: Path | None, price: float | None
) -> Iterator[str]:
    """As `plan_recipe`, of train-vla-rl."""
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    costs, described = _given(given, RobotCosts.nothing())
    with project(recipe.folder):
        store = open_store(machine)
    runs = [read_robot_run(path, store) for path in records]
    if runs and not gpus:
        yield from plan_robots_as_measured(recipe, runs, (costs, f"given: {given}"))
        return
    _refuse_gpu(gpu)
    settings, _, policy, _ = robot_sections(recipe)
    with project(recipe.folder):
        cameras = len(settings.simulator.camera_name_mapping)
        sizes = policy_geometry(read_policy_config(policy), policy, cameras)
    workload = robot_workload_of(runs[0]) if runs else described_robot_workload(recipe, described, given)
    planner = RobotPlanner(recipe, sizes, GPUS[gpu], workload, (costs, f"given: {given}"))
    yield from plan_robots(recipe, planner, gpus, price)


def _refuse_gpu(gpu: str) -> None:
    if gpu not in GPUS:
        raise ConfigurationError(f"no GPU is called {gpu!r}", where="--gpu", remedy=suggestion(gpu, GPUS))


def plan_row(planner: Planner, gpus: int) -> tuple[list[str], Costs]:
    """The cells below `HEAD` for so many GPUs, and the costs that they rest on. Raises as `Planner.plan` does."""
    layout, run, found = planner.plan(gpus)
    wall, gain = first_wall(run, found, WALLS)
    tensor = f" x {layout.gpus_per_server}" if layout.gpus_per_server > 1 else ""
    row = [
        f"{gpus:,}",
        f"{layout.servers:,}{tensor}",
        f"{layout.ranks:,}",
        f"{found.step_seconds:,.1f} s",
        f"{found.samples_per_step / found.step_seconds:,.1f}",
        f"{found.gpu_seconds:,.2f}",
        f"{found.server_share:.0%}",
        f"{found.sequences_per_server:.0f}",
        f"{found.trainer_share:.0%}",
        f"{layout.server_bytes / GIB:.0f}",
        f"{layout.trainer_bytes / GIB:.0f}",
        f"{wall} ({gain:.0%} of the cost)" if wall else "none: servers and trainer compute",
    ]
    return row, run.costs


def _as_measured(
    name: str,
    settings: TrainVLMSettings,
    machine: Machine,
    runs: Sequence[RunRecords],
    given: tuple[Mapping[str, Any], str],
) -> Iterator[str]:
    """The recipe on the machine of `runs`, by their costs; beside the steps of the first, if it is that recipe."""
    found, first = measured_runs(runs, machine), runs[0]
    plans = (settings.rollouts, settings.batches, settings.trainer)
    run = replace(found.runs[0], rollouts=plans[0], batches=plans[1], trainer=plans[2])
    run = replace(run, costs=run.costs.replaced(*given))
    predicted = run.simulate()
    bounds = [replace(run, costs=costs.replaced(*given)).simulate().timings for costs in found.bounds]
    same = plans[:2] == (first.settings.rollouts, first.settings.batches)
    yield f"{name} on the machine of {', '.join(str(one.path) for one in runs)}, simulated by its costs"
    yield ""
    rows = [["seconds", "predicted", *(["between"] if bounds else []), *(["measured", "difference"] if same else [])]]
    for part in SHOWN:
        key = f"timing/{part}"
        row = [part, f"{predicted.timings[key]:.2f}"]
        if bounds:
            row.append(" and ".join(f"{each:.2f}" for each in sorted(timings[key] for timings in bounds)))
        if same:
            row += beside(predicted.timings[key], first.mean(key))
        rows.append(row)
    yield from table(rows)
    if len(runs) > 1:
        yield ""
        yield from table(list(_themselves(runs, found)))
    yield ""
    yield (
        f"busy: servers {predicted.server_share:.0%}, trainer {predicted.trainer_share:.0%}, event loop of the flow "
        f"process {predicted.flow_share:.0%} of the time"
    )
    if found.unknown:
        yield (
            f"not known: how much of {', '.join(found.unknown)} is fixed, whatever the size of a step, as all steps of "
            "the run were of about one size; half of it is taken to be. A second --from with another "
            "rollouts.groups_per_step says it"
        )
    for one in runs:
        if one.left_out:
            yield f"{one.left_out} steps of {one.path} do not count: they had another number of servers or ranks"
    yield "these seconds hold for the load that the machine had meanwhile" + (
        f": {found.slowdown:.1f} s passed for each second that the run's threads computed" if found.slowdown else ""
    )
    if settings.rollouts.max_staleness and not machine.gpus_of_trainer:
        in_turn = settings.rollouts.model_copy(update={"max_staleness": 0, "in_flight_updates": False})
        yield (
            "rollouts and training at the same time have CPUs of their own here; where others leave none to spare, a "
            f"step takes up to {replace(run, rollouts=in_turn).simulate().step_seconds:.2f} s, as in turn"
        )
    yield ""
    yield "what this rests on:"
    yield f"  {'episodes':<32} {'':>10}  {run.workload.source}"
    yield from (f"  {line}" for line in run.costs.lines())


def _themselves(runs: Sequence[RunRecords], found: MeasuredRuns) -> Iterator[list[str]]:
    """The runs, by the costs of all; "at its load" is how far off what is predicted for the slowdown of the run."""
    yield ["rollouts in a step", "predicted", "measured", "difference", "slowdown", "at its load", "run"]
    for one, made in zip(runs, found.runs, strict=True):
        step, measured = made.simulate().step_seconds, one.mean("timing/step")
        load = ["", ""]
        if found.slowdown is not None and one.slowdown is not None:
            load = [f"{one.slowdown:.1f}", f"{step * one.slowdown / found.slowdown / measured - 1:+.1%}"]
        yield [f"{one.mean('rollouts/planned'):.0f}", f"{step:.2f}", *beside(step, measured), *load, str(one.path)]


def _given(file: Path | None, nothing: CostTables) -> tuple[dict[str, Any], dict[str, Any]]:
    """The costs, of the kind of `nothing`, and the workload of a file.

    Raises:
        ConfigurationError: it cannot be read, or has an unknown cost.
    """
    values = dict(read_toml(file)) if file is not None else {}
    workload = dict(values.pop("workload", {}))
    try:
        nothing.replaced(values, "")
    except ValidationError as error:
        raise ConfigurationError(explain(error, "", type(nothing)), where=str(file)) from error
    return values, workload


def described_workload(settings: TrainVLMSettings, values: Mapping[str, Any], file: Path | None) -> Workload:
    """Episodes as the file says; what it leaves out is assumed from the recipe."""
    environment, sampling = settings.environment, settings.rollouts.sampling
    kind = ENVIRONMENTS[environment.name]
    most = environment.args.get("max_turns") or getattr(kind, "max_turns", None) or 1
    prompt = min(512, max(16, settings.inference.max_model_len - sampling.max_tokens))
    assumed: dict[str, Any] = {
        "turns": 1.0 if most == 1 else most / 2,
        "max_turns": most,
        "dialogue": bool(getattr(kind, "dialogue", True)),
        "prompt_tokens": prompt,
        "completion_tokens": sampling.max_tokens / 2,
    }
    try:
        made = WorkloadSettings.model_validate(assumed | dict(values))
    except ValidationError as error:
        raise ConfigurationError(explain(error, "workload", WorkloadSettings), where=str(file)) from error
    said = made.model_dump()
    parts = [f"{key} = {said[key]:g}" if not isinstance(said[key], bool) else f"{key} = {said[key]}" for key in said]
    given = f"given in {file}: {', '.join(values)}; the rest " if values else ""
    return drawn(made, sampling.max_tokens, settings.rollouts.seed, f"{given}assumed: {', '.join(parts)}")
